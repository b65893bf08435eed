"""What the shell promises to people and scripts: one table or object, an exit code, one sentence of error."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
import pytest
from click.testing import CliRunner
from made_up_store import FP8, H100, H200, HEURISTIC, MANY, WINNER, fill, hold, live, rewrite
from shell_page import BLOCKS, HEADINGS, PAGE, printed

from sglang_moe_autotune import doctor, landscape, selection, status
from sglang_moe_autotune import held as held_files
from sglang_moe_autotune.cli import main
from sglang_moe_autotune.contract import CONTRACT
from sglang_moe_autotune.held import Candidate, Held
from sglang_moe_autotune.shapes import ConfigPair, KernelConfig
from sglang_moe_autotune.trials import environment_key

if TYPE_CHECKING:
    from click.testing import Result

    from sglang_moe_autotune.records import Environment

LANDSCAPE, *_ = landscape.shipped()
COMMANDS = (
    "status", "list", "show E128", "explain E128 256", "export out", "report -o page.html", "doctor",
    f"simulate {LANDSCAPE}", "merge host-2 --dry-run", "forget E128 --yes",
    "quarantine", "quarantine e128 --clear --yes",
    f"pin E128 64 --up '{json.dumps(WINNER.up.to_dict())}'",
)  # fmt: skip


def shell(line: str) -> Result:
    """Run a command line; the exit code, and both streams apart."""
    result = CliRunner().invoke(main, shlex.split(line), terminal_width=80)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")
    return folder


@pytest.fixture
def store(autotune_folder: Path) -> Path:
    fill(autotune_folder)
    fill(Path("host-2"), H100)
    now = time.time()
    hold(autotune_folder)
    deferred = {f"{MANY.slug} 16384": "too large for free memory"}
    assert status.write(autotune_folder, live(unix_s=now, since_unix_s=now - 5400, deferred=deferred))
    return autotune_folder


# The page

@pytest.mark.parametrize(("line", "expected"), BLOCKS, ids=[line for line, _ in BLOCKS])
def test_the_page_shows_what_is_printed(store: Path, working_folder: Path, line: str, expected: str) -> None:
    got = printed(line, store, working_folder)
    wanted = expected.splitlines()
    if line == "doctor":  # the machine differs, the checks do not
        got, wanted = ([row[8:40].strip() for row in rows if row[8:40].strip()] for rows in (got, wanted))
    if line.startswith("simulate"):  # the search may improve, what was recorded stays
        got, wanted = ([row.split()[: 2 if row[:5].strip().isdecimal() else 1] for row in r] for r in (got, wanted))
    assert got == wanted


def test_the_page_counts_the_parts_of_the_contract() -> None:
    assert f"({len(CONTRACT)} parts)" in PAGE.read_text(encoding="utf-8")


def test_the_page_has_every_command() -> None:
    shown = {line.split()[0] for line, _ in BLOCKS}
    assert set(HEADINGS) >= set(main.commands)
    assert shown == set(main.commands)


def test_what_is_not_served_is_said_with_the_reason(
    store: Path, working_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (working_folder / "configs").mkdir()
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", str(working_folder))  # not what the SGLang here ships
    for command in ("explain E128 256", "show E128"):
        told = re.sub(r"\s+", " ", shell(command).stdout)
        assert "not served" not in told
        assert f"in quarantine, tried at no M: down {WINNER.down} (M=256): its first launch took" in told
    assert shell("off").exit_code == 0
    told = re.sub(r"\s+", " ", shell("explain E128 256").stdout)
    assert "and not served: switched off" in told
    assert "Answer: heuristic" in told
    assert "M=256, 1024 not served: switched off" in re.sub(r"\s+", " ", shell("show E128").stdout)
    seen = json.loads(shell("explain E128 256 --json").stdout)
    assert (seen["switch"], seen["answer"]["source"], len(seen["quarantine"])) == ("off", "heuristic", 1)
    (shown,) = json.loads(shell("show E128 --json").stdout)["shapes"]
    assert [row["M"] for row in shown["rows"] if row["not_served"]] == [256, 1024]
    assert shell("on").exit_code == 0
    monkeypatch.setenv("SGLANG_MOE_AUTOTUNE_BIT_EQUAL", "on")
    assert "SGLANG_MOE_AUTOTUNE_BIT_EQUAL asks" in re.sub(r"\s+", " ", shell("explain E128 256").stdout)


# Output

@pytest.mark.parametrize("line", COMMANDS)
def test_json_is_one_object_and_nothing_else(store: Path, line: str) -> None:
    result = shell(f"{line} --json")
    assert isinstance(json.loads(result.stdout), dict)
    assert result.stdout.count("\n{") == 0


@pytest.mark.parametrize("line", [*COMMANDS, "--help", *(f"{c} --help" for c in main.commands)])
def test_a_pipe_gets_no_colour_and_no_wide_table(store: Path, line: str) -> None:
    output = shell(line).output
    assert "\x1b" not in output
    if not line.startswith("export"):  # a path is one word, however long
        assert max(map(len, output.replace(str(store), "~/store").splitlines())) <= 80


@pytest.mark.parametrize("letters", [3, 40, 70, 200])
def test_a_long_path_of_the_store_stays_whole(tmp_path: Path, letters: int) -> None:
    root = tmp_path / f"{'a' * letters} b"
    fill(root)
    first, second = shell(f"status --dir '{root}'").stdout.splitlines()[:2]
    assert (first, second) == (f"Store: {root}", "")


@pytest.mark.parametrize("command", sorted(main.commands))
def test_help_has_an_example_that_parses(command: str) -> None:
    examples = re.findall(r"^ +sglang-moe-autotune (.*)$", shell(f"{command} --help").output, re.MULTILINE)
    assert examples
    for example in examples:
        name, *arguments = shlex.split(example)
        Path("landscape.json.gz").touch()
        found = main.commands[name]
        found.make_context(name, arguments, parent=click.Context(main))


def test_a_shape_is_printed_as_json_that_says_it_all(store: Path) -> None:
    (shape,) = json.loads(shell(f"show {FP8.slug} --json").stdout)["shapes"]
    assert shape["shape"]["slug"] == FP8.slug
    assert shape["shape"]["block_shape"] == [128, 128]
    row, _ = shape["rows"]
    assert row["chosen"] == {"up": WINNER.up.to_dict(), "down": WINNER.down.to_dict()}
    assert row["baseline"] == {"up": HEURISTIC.up.to_dict(), "down": HEURISTIC.down.to_dict()}
    assert (row["M"], row["verdict"], row["baseline_us"], row["chosen_us"]) == (128, "faster", 488.0, 367.0)
    assert row["gain"] == pytest.approx(1 - 367 / 488)
    assert (row["samples"], row["served"], row["sglang"]) == (24, 77, "0.5.16")


def test_list_as_json_agrees_with_show(store: Path) -> None:
    (environment,) = json.loads(shell("list --json").stdout)["environments"]
    assert environment["environment"]["device_name"] == "NVIDIA H200"
    for shape in environment["shapes"]:
        (shown,) = json.loads(shell(f"show {shape['shape']['slug']} --json").stdout)["shapes"]
        by_verdict: dict[str, list[int]] = {
            "faster": [], "baseline": [], "untuned": [], "given": [], "replayed": [],
        }  # fmt: skip
        for row in shown["rows"]:
            if row["verdict"] or row["served"]:
                by_verdict[row["verdict"] or "untuned"].append(row["M"])
        assert shape["M"] == by_verdict


def test_brackets_in_a_name_are_printed_not_obeyed(autotune_folder: Path) -> None:
    fill(autotune_folder, msgspec.structs.replace(H100, device_name="[red]X[/red] :smile:"))
    assert "[red]X[/red] :smile:, Triton 3.6.0" in shell("list").stdout


def test_status_shows_the_gone_only_when_asked(store: Path) -> None:
    me = status.this_process()
    assert status.write(store, live(me._replace(pid=2**22 + 7), unix_s=time.time() - 300))
    assert f"pid {2**22 + 7}" not in shell("status").stdout
    assert "Gone: 1" in shell("status").stdout
    assert re.search(rf"gone  pid {2**22 + 7} .*last word 5 min ago", shell("status --all").stdout)
    servers = json.loads(shell("status --json").stdout)["servers"]
    assert [s["presence"] for s in servers] == ["running", "gone"]


def test_status_says_what_is_broken(store: Path) -> None:
    hooks = {"a.b.run_batch": False, "a.b.load": True}
    fields = {"hooks": hooks, "serving_compiles_for_tuning": 3, "state": "off", "reason": "two crashes"}
    assert status.write(store, live(unix_s=time.time(), **fields))
    (store / "live" / "1-0.json").write_text("{")
    result = shell("status")
    assert "off (two crashes)" in result.stdout
    assert "the hook on a.b.run_batch is not in place" in result.stdout
    assert "a.b.load" not in result.stdout
    assert "3 kernels were compiled in the serving process" in result.stdout
    assert "1-0.json: not a live status" in result.stderr


def test_status_says_which_graphs_are_behind_and_how_long_captures_took(store: Path) -> None:
    graphs = status.GraphCounts(
        "idle", "prefill graphs: not one by one", 30, ("decode 16", "decode 32"), {"decode 32": "no memory"},
        {"recaptured": 7, "failed": 1}, {"decode 8": 84.2, "decode 16": 91.7},
    )  # fmt: skip
    assert status.write(store, live(unix_s=time.time(), graphs=graphs))
    shown = re.sub(r"\s+", " ", shell("status").stdout)
    assert "2 of 30 captured graphs hold an older config; 1 failed, 7 recaptured, longest pause 92 ms" in shown
    assert "(recapture idle: prefill graphs: not one by one)" in shown
    assert "not now: graph decode 32: no memory" in shown
    assert status.write(store, live(unix_s=time.time()))
    assert "captured graphs" not in shell("status").stdout


# Exit codes

def one_sentence(result: Result) -> str:
    """The error: one line on stderr, nothing on stdout."""
    assert result.stdout == ""
    *_, last = result.stderr.strip().splitlines()
    assert last.startswith("Error: ")
    return last


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        pytest.param("list", 1, "nothing is stored", id="list"),
        pytest.param("show E128", 1, "nothing is stored", id="show"),
        pytest.param("export out", 1, "nothing is stored", id="export"),
        pytest.param("simulate nowhere.json", 2, "does not exist", id="simulate"),
        pytest.param("lsit", 2, "No such command", id="no such command"),
        pytest.param("list --colour", 2, "No such option", id="no such option"),
        pytest.param("show", 2, "Missing argument", id="no shape"),
    ],
)
def test_an_empty_machine(line: str, code: int, says: str) -> None:
    result = shell(line)
    assert result.exit_code == code
    assert says in one_sentence(result)
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("line", "code"),
    [
        pytest.param("list --json", 1, id="nothing found"),
        pytest.param("list --json --colour", 2, id="no such option"),
        pytest.param("lsit --json", 2, id="no such command"),
        pytest.param("show --json", 2, id="no shape"),
        pytest.param("export --json", 2, id="no folder"),
        pytest.param("off --json --dir nowhere", 1, id="no server"),
        pytest.param("merge nowhere --json", 3, id="no file"),
        pytest.param("status --json --url http://127.0.0.1:9", 3, id="no answer"),
    ],
)
def test_json_is_one_object_also_where_it_goes_wrong(line: str, code: int) -> None:
    result = shell(line)
    assert result.exit_code == code
    told = json.loads(result.stdout)
    assert told["exit_code"] == code
    assert told["error"] in result.stderr


def test_an_object_that_was_printed_is_not_followed_by_another(autotune_folder: Path) -> None:
    path = fill(autotune_folder)
    document: dict[str, Any] = json.loads(path.read_text())
    document["records"] = []
    rewrite(path, document)
    result = shell("export out --json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["files"] == []


def test_status_of_an_empty_machine_is_an_answer_and_code_1() -> None:
    result = shell("status")
    assert (result.exit_code, result.stderr) == (1, "")
    assert "No server writes here now.\n\nNothing is stored yet." in result.stdout
    assert json.loads(shell("status --json").stdout)["servers"] == []


@pytest.mark.parametrize("line", ["status", "list", "show E128", "export out", "status --json"])
def test_a_full_store_is_code_0(store: Path, line: str) -> None:
    assert shell(line).exit_code == 0


@pytest.mark.parametrize("line", ["show E999", "list --environment B200", "show E128 --environment B200"])
def test_what_is_not_there_is_code_1_and_names_what_is(store: Path, line: str) -> None:
    result = shell(line)
    assert result.exit_code == 1
    assert re.search(f"H200|{MANY.slug}", one_sentence(result))


@pytest.mark.parametrize("line", ["list", "show E128", "export out"])
@pytest.mark.parametrize("text", ["", "{", '{"schema": 99}'])
def test_a_store_that_cannot_be_read_is_code_3(store: Path, line: str, text: str) -> None:
    (path,) = store.glob("nvidia*.json")
    path.write_text(text)
    result = shell(line)
    assert result.exit_code == 3
    assert "--dir" in one_sentence(result)
    assert path.name in result.stderr
    assert path.read_text() == text


def test_status_of_a_store_that_cannot_be_read_is_an_answer_and_code_3(store: Path) -> None:
    (path,) = store.glob("nvidia*.json")
    path.write_text("{")
    result = shell("status")
    assert result.exit_code == 3
    assert f"{path.name} " in result.stdout
    (environment,) = json.loads(shell("status --json").stdout)["environments"]
    assert environment["environment"] is None
    assert "broken" in environment["problems"][0]


def test_one_bad_file_does_not_hide_the_good_ones(store: Path) -> None:
    (store / "other.json").write_text("{")
    result = shell("list")
    assert result.exit_code == 0
    assert MANY.slug in result.stdout
    assert "other.json" in result.stderr
    assert "Traceback" not in result.stderr


def test_without_a_home_the_cure_is_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_MOE_AUTOTUNE_DIR")
    monkeypatch.setenv("HOME", "/")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    result = shell("list")
    assert result.exit_code == 2
    assert "--dir" in one_sentence(result)


@pytest.mark.parametrize("line", ["status", "list", "show E128"])
def test_a_file_where_the_folder_should_be(line: str) -> None:
    Path("plain").write_text("")
    assert shell(f"{line} --dir plain").exit_code == 2
    Path("below").mkdir()
    Path("below/live").write_text("")
    assert shell(f"{line} --dir below").exit_code == (3 if line == "status" else 1)


def test_dir_wins_over_the_environment_variable(store: Path) -> None:
    fill(Path("mine"), H100)
    assert "H100" in shell("list --dir mine").stdout
    assert "H200" in shell("list").stdout


def test_several_environments_are_all_listed_and_one_is_chosen_to_read(store: Path) -> None:
    fill(store, H100)
    both = shell("list")
    assert "NVIDIA H100 80GB HBM3, Triton 3.6.0" in both.stdout
    assert "NVIDIA H200, Triton 3.6.0" in both.stdout
    for line in ("show E128", "explain E128 256", "export out"):
        result = shell(line)
        assert result.exit_code == 0
        assert re.search(r"^of 2 environments this is .*--environment: ", result.stderr, re.MULTILINE)
        chosen = shell(f"{line} --environment h100")
        assert chosen.exit_code == 0
        assert "environments" not in chosen.stderr
    change = shell("forget E128 --yes")
    assert change.exit_code == 2
    assert re.search("choose with --environment: .*H100.*; .*H200", one_sentence(change))


def variants(store: Path, *environments: Environment) -> None:
    for number, environment in enumerate(environments):
        path = fill(store, environment)
        document = json.loads(path.read_text())
        for record in document["records"]:
            record["unix_s"] += number
        rewrite(path, document)


@pytest.mark.parametrize(
    ("triton", "kernel", "gpus", "expected"),
    [
        pytest.param("3.6.0", "old", {"NVIDIA H200"}, "for what is installed here: NVIDIA H200", id="all known"),
        pytest.param("3.6.0", "old", {"B200"}, "installed here, the newest of those: NVIDIA H100", id="another gpu"),
        pytest.param("3.8.0", "new", set(), "what is installed here: NVIDIA H200, Triton 3.8.0", id="upgraded"),
        pytest.param("3.9.9", "none", set(), "the newest: NVIDIA H200, Triton 3.8.0", id="nothing fits"),
        pytest.param(None, None, set(), "the newest: NVIDIA H200, Triton 3.8.0", id="nothing installed"),
    ],
)
def test_what_is_installed_here_is_shown_else_the_newest(
    autotune_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    triton: str | None,
    kernel: str | None,
    gpus: set[str],
    expected: str,
) -> None:
    old = msgspec.structs.replace(H200, kernel_hash="old")
    new = msgspec.structs.replace(H200, triton="3.8.0", kernel_hash="new")
    variants(autotune_folder, old, msgspec.structs.replace(H100, kernel_hash="old"), new)
    monkeypatch.setattr(doctor, "version_of", lambda _: triton)
    monkeypatch.setattr(selection, "_kernel_here", lambda: set() if kernel is None else {kernel})
    monkeypatch.setattr(selection, "_gpus_here", lambda: gpus)
    result = shell("show E128")
    assert result.exit_code == 0
    assert expected in result.stderr


def test_the_kernel_that_is_installed_is_known_without_an_import() -> None:
    from sglang_moe_autotune import releases  # noqa: PLC0415 - torch, which the shell does without

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what older releases warn of where there is no GPU
        releases.fused_module()
    assert selection._kernel_here() == {releases.kernel_hash(releases.invoke_function())}


def test_a_shape_of_one_environment_needs_no_choice(store: Path) -> None:
    other = fill(store, H100)
    document = json.loads(other.read_text())
    document["shapes"], document["records"] = [], []
    rewrite(other, document)
    assert "on NVIDIA H200" in shell("show E128").stdout


def test_a_store_without_learned_rows_exports_nothing(autotune_folder: Path) -> None:
    path = fill(autotune_folder)
    document: dict[str, Any] = json.loads(path.read_text())
    document["records"] = [r for r in document["records"] if r["verdict"] == "baseline"]
    rewrite(path, document)
    result = shell("export out")
    assert result.exit_code == 1
    assert "nothing that was learned" in result.stderr
    assert list(Path().glob("out/**/*.json")) == []


def test_an_export_refuses_the_folder_that_holds_the_files_and_one_that_is_not_there(store: Path) -> None:
    assert shell("export out").exit_code == 0
    refused = shell("export out/configs")
    assert refused.exit_code == 2
    assert f"name its parent, {Path('out').absolute()}" in one_sentence(refused)
    assert not Path("out/configs/configs").exists()
    typo = shell("export --merge-into nowhere/x")
    assert typo.exit_code == 2
    assert not Path("nowhere").exists()
    merged = shell("export --merge-into out/configs")
    assert merged.exit_code == 0
    assert "none of the configs that it ships" not in merged.stderr
    assert "and what was in the folder" in merged.stderr


def replay(path: Path) -> None:
    """Make the records of a file what the demo leaves."""
    document = json.loads(path.read_text())
    for record in document["records"]:
        record["source"] = "replayed"
    rewrite(path, document)


def test_replayed_rows_are_called_so_and_never_counted(autotune_folder: Path) -> None:
    replay(fill(autotune_folder))
    listed = shell("list").stdout
    assert "replayed" in listed
    assert "%" not in listed
    (environment,) = json.loads(shell("list --json").stdout)["environments"]
    for shape in environment["shapes"]:
        assert shape["M"]["faster"] == shape["M"]["baseline"] == []
        assert shape["M"]["replayed"]
        assert shape["best_gain"] is None
    merged = shell(f"merge {autotune_folder} --dir other")
    assert "replayed" in merged.stdout
    assert "faster" not in merged.stdout
    page = shell("report").stdout
    assert "4 of the rows are replayed" in page
    assert "<b>0</b><span>rows faster</span>" in page
    assert "<b>0.0 s</b><span>GPU time spent</span>" in page
    assert f"<h3>{MANY.slug}, replayed</h3>" in page
    assert "30.6 %, replayed" in page
    assert "served</i>" not in page
    assert "<th>found us</th>" in page
    assert "trials on the recording.</p>" in page
    assert "trials in 0.0 GPU s" not in page
    lost = shell("forget E128 --yes").stderr
    assert "3 replayed" in lost
    assert "gains" not in lost


def test_an_export_of_replayed_rows_warns(autotune_folder: Path) -> None:
    replay(fill(autotune_folder))
    assert shell("export out").exit_code == 1
    done = shell("export out --replayed")
    assert done.exit_code == 0
    assert "measured on no GPU here" in done.stderr


def test_in_a_pipe_no_line_ends_in_blanks(store: Path) -> None:
    for line in ("list", "show E128", "explain E128 256", "status", "quarantine", "doctor"):
        assert [text for text in shell(line).stdout.splitlines() if text != text.rstrip()] == []


def test_an_empty_quarantine_is_the_healthy_case(autotune_folder: Path) -> None:
    result = shell("quarantine")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "Nothing is in quarantine" in result.stdout
    assert json.loads(shell("quarantine --json").stdout) == {"quarantine": [], "cleared": False}
    assert shell("quarantine E128").exit_code == 1


def test_an_export_never_overwrites_what_it_did_not_write(store: Path) -> None:
    folder = Path("out/configs/triton_3_6_0")
    folder.mkdir(parents=True)
    mine = folder / "E=128,N=768,device_name=NVIDIA_H200.json"
    mine.write_text('{"1": {}}')
    result = shell("export out")
    assert result.exit_code == 3
    assert mine.name in one_sentence(result)
    assert mine.read_text() == '{"1": {}}'


def test_what_took_a_server_down_is_not_exported(autotune_folder: Path) -> None:
    """A stock SGLang would serve it."""
    fill(autotune_folder)
    candidate = Candidate(environment_key(H200), MANY, "down", WINNER.down)
    held_files.keep(autotune_folder / held_files.FOLDER, Held(candidate, "a process ended", 64, 1.0))
    result = shell("export out")
    assert result.exit_code == 0
    assert "2 rows are left out: a config of theirs ended or hung a process" in result.stderr
    texts = {Path(path).name: json.loads(Path(path).read_text()) for path in result.stdout.splitlines()[:-1]}
    assert all("E=256" in name for name in texts), "the other shape has its rows"
    assert texts


def test_an_exported_folder_can_be_pasted_into_a_shell(store: Path) -> None:
    result = shell("export 'a folder'")
    *_, line = result.stdout.splitlines()
    _, assignment = shlex.split(line)
    assert assignment == f"SGLANG_MOE_CONFIG_DIR={Path('a folder').absolute()}"
    assert all(Path(path).is_file() for path in result.stdout.splitlines()[:-1])


def test_a_bad_setting_is_a_message_not_an_end(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_MOE_AUTOTUNE_SLICE_US", "soon")
    result = shell("list --json")
    assert result.exit_code == 0
    assert "SGLANG_MOE_AUTOTUNE_SLICE_US" in result.stderr
    assert json.loads(result.stdout)


def test_doctor_fails_with_code_1_only_for_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_MOE_AUTOTUNE_MODE", "off")
    before = json.loads(shell("doctor --json").stdout)
    monkeypatch.setenv("SGLANG_PLUGINS", "another")
    after = shell("doctor --json")
    assert after.exit_code == 1
    assert json.loads(after.stdout)["healthy"] is False
    assert {c["check"]: c["state"] for c in before["checks"]}["mode"] == "warn"


# Simulate


def test_a_simulation_can_be_recomputed_from_its_object() -> None:
    recorded = landscape.load(LANDSCAPE)
    result = json.loads(shell(f"simulate {LANDSCAPE} --seed 3 --noise 1 --json").stdout)
    assert result["seed"] == 3
    assert set(result["per_m"]) == set(result["configs"]) == {str(m) for m in recorded.ms}
    for m, row in result["per_m"].items():
        pair = ConfigPair(*(KernelConfig.from_dict(result["configs"][m][gemm]) for gemm in ("up", "down")))
        assert row["chosen_us"] == pytest.approx(recorded.pair_us(int(m), pair))
        assert row["regret"] == pytest.approx(row["chosen_us"] / row["best_us"] - 1)


def test_the_options_of_a_simulation_reach_it() -> None:
    def spent(options: str) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(shell(f"simulate {LANDSCAPE} --json {options}").stdout)
        return result

    assert spent("") == spent("--seed 0 --noise 2")
    assert spent("--seed 1")["gpu_s"] != spent("--seed 2")["gpu_s"]
    assert spent("--noise 0.5")["gpu_s"] != spent("--noise 4")["gpu_s"]
    assert spent("--budget-s 0.1")["gpu_s"] < 0.2


@pytest.mark.parametrize(
    "option", ["--seed x", "--seed -1", "--budget-s 0", "--budget-s nan", "--noise -1", "--noise nan"]
)
def test_a_senseless_option_is_wrong_usage(option: str) -> None:
    assert shell(f"simulate {LANDSCAPE} {option}").exit_code == 2


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"{}", id="nothing in it"),
        pytest.param(b"null", id="null"),
        pytest.param(LANDSCAPE.read_bytes()[:9000], id="cut"),
        pytest.param(b"\xff", id="not text"),
    ],
)
def test_a_file_that_is_no_landscape_is_code_3(content: bytes) -> None:
    Path("bad.json").write_bytes(content)
    result = shell("simulate bad.json")
    assert result.exit_code == 3
    assert "bad.json" in one_sentence(result)


# Real processes

BLOCKED = """
import sys
for name in ("torch", "triton", "sglang"):
    sys.modules[name] = None
from sglang_moe_autotune.cli import main
main(prog_name="sglang-moe-autotune")
"""


def child(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=os.environ)


def test_the_shell_runs_without_torch_triton_and_sglang(store: Path) -> None:
    done = child("-c", BLOCKED, "show", "E128")
    assert (done.returncode, done.stderr) == (0, "")
    assert "308.9" in done.stdout
    rows = json.loads(child("-c", BLOCKED, "doctor", "--json").stdout)["checks"]
    assert {r["check"]: r["state"] for r in rows}["hooks"] == "unknown"


def test_a_reader_that_goes_away_is_no_traceback(store: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "sglang_moe_autotune.cli", "list"]
    with os.fdopen(write, "wb") as pipe:
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, check=False, timeout=60)
    assert b"Traceback" not in done.stderr


def test_in_a_pipe_no_line_is_broken(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    command = [sys.executable, "-m", "sglang_moe_autotune", "list", "--dir", str(store)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "E256-N256-K7168-top8-fp8_w8a8-block128x128" in done.stdout


def test_the_quarantine_is_listed_by_part_of_a_name_and_cleared_after_a_question(store: Path) -> None:
    (one,) = json.loads(shell("quarantine DOWN --json").stdout)["quarantine"]
    assert (one["shape"], one["gemm"], one["M"]) == (MANY.slug, "down", 256)
    assert one["config"] == WINNER.down.to_dict()
    assert shell("quarantine fp8").exit_code == 1
    assert shell("quarantine --clear --json").exit_code == 2
    assert CliRunner().invoke(main, ["quarantine", "--clear"], input="n\n").exit_code == 1
    assert shell("quarantine").exit_code == 0, "no was meant"
    cleared = shell("quarantine H200 --clear --yes")
    assert cleared.exit_code == 0
    assert "1,023 times" in cleared.stderr
    assert "Nothing is in quarantine" in shell("quarantine").stdout
    assert json.loads(shell("quarantine --json").stdout) == {"quarantine": [], "cleared": False}


def test_what_a_server_leaves_out_is_in_its_status(store: Path) -> None:
    now = time.time()
    held = {f"{MANY.slug} up 16x64x64 g1": "a process ended in the middle of its first launch"}
    assert status.write(store, live(unix_s=now, since_unix_s=now, quarantine=held))
    assert f"in quarantine: {MANY.slug} up 16x64x64 g1: a process ended" in shell("status").stdout
