"""The contract holds for the installed SGLang, and each way in which a later one may move or change is found."""

from __future__ import annotations

import inspect
import re
import shutil
from typing import TYPE_CHECKING

import pytest
from sglang_ways import skip_unless

from sglang_moe_autotune import doctor, fit, kernel_source
from sglang_moe_autotune.contract import (
    CONTRACT,
    HARMLESS_REQUESTS,
    LAUNCH,
    LAUNCH_LEADING,
    LAUNCH_NAMED,
    NEEDED,
    QUANT_FIELDS,
    Calls,
    Has,
    Lacks,
    LaunchesTriton,
    OneOf,
    Returns,
    Rule,
    Says,
    Takes,
)
from sglang_moe_autotune.source import Source
from sglang_moe_autotune.targets import LOOKUP

if TYPE_CHECKING:
    from pathlib import Path

    from scheduler_process import SchedulerProcess

    from sglang_moe_autotune.contract import Part

# -- each rule, on a module made to order -------------------------------------------------------------------------

MODULE = """
import triton
from pkg.words import other as renamed

LIMIT: int = 3

class Base:
    def __init__(self):
        self.kept, self.also = 1, 2

    @property
    def shown(self): ...

class Thing(Base):
    field: int
    alias = field

    def method(self, a, b, *, c=0, d): ...

@triton.jit
def kernel(x, N: "tl.constexpr"):
    pass

def helper(): ...

def launch(a, b, c=1):
    kernel[(1,)](a)
    helper()
    return a

def pair(a):
    if a:
        return a, (b, None)
    return a
"""


@pytest.fixture
def source(tmp_path: Path) -> Source:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "module.py").write_text(MODULE)
    (tmp_path / "pkg" / "words.py").write_text('def other(x): ...\nNAME = "spoken"\n')
    (tmp_path / "pkg" / "front.py").write_text("from .module import launch, Thing\nfrom pkg.gone import missing")
    (tmp_path / "pkg" / "broken.py").write_text("class (")
    return Source(tmp_path)


HOLDS: list[tuple[Rule, str]] = [
    (Has("pkg.module", "", ("LIMIT", "Thing", "renamed", "kernel")), ""),
    (Has("pkg.module", "", ("LIMIT", "gone")), "has no gone"),
    (Has("pkg.nowhere", "", ("x",)), "there is no pkg.nowhere"),
    (Has("pkg.module", "Thing", ("field", "alias", "method", "kept", "also", "shown")), ""),
    (Has("pkg.front", "Thing", ("field", "kept")), ""),
    (Has("pkg.module", "Thing", ("c",)), "Thing has no c"),
    (Has("pkg.module", "Gone", ("c",)), "there is no pkg.module.Gone"),
    (Lacks("pkg.module", "gone"), ""),
    (Lacks("pkg.nowhere", "gone"), ""),
    (Lacks("pkg.module", "LIMIT"), "has LIMIT"),
    (Takes("pkg.module", "launch", ("a",), ("b",)), ""),
    (Takes("pkg.front", "launch", ("a", "b")), ""),
    (Takes("pkg.module", "renamed", ("x",)), ""),
    (Takes("pkg.module", "launch", ("b",)), "takes (a, ...), not (b, ...)"),
    (Takes("pkg.module", "launch", ("a",)), "needs b"),
    (Takes("pkg.module", "Thing.method", ("self", "a"), ("b", "d")), ""),
    (Takes("pkg.module", "Thing.method", ("self", "a"), ("b",)), "needs d"),
    (Takes("pkg.front", "missing", ()), "there is no function pkg.front.missing"),
    (Calls(("pkg.words", "pkg.module"), "helper"), ""),
    (Calls(("pkg.words",), "helper"), "does not call helper"),
    (Says("pkg.words", ("NAME", "spoken")), ""),
    (Says("pkg.words", ("silent",)), "does not say silent"),
    (Says("pkg.nowhere", ("silent",)), "does not say silent"),
    (Returns("pkg.module", "pair", ("(_, (_, _))", "_")), ""),
    (Returns("pkg.module", "launch", ("(_, _)",)), "returns _, not (_, _)"),
    (LaunchesTriton("pkg.module", "launch"), ""),
    (LaunchesTriton("pkg.front", "launch"), ""),
    (LaunchesTriton("pkg.module", "pair"), "names no Triton kernel"),
    (OneOf((("a", (Lacks("pkg.module", "LIMIT"),)), ("b", (Has("pkg.module", "", ("LIMIT",)),)))), ""),
    (OneOf((("a", (Lacks("pkg.module", "LIMIT"),)), ("b", (Has("pkg.module", "", ("x",)),)))), "or else"),
]


@pytest.mark.parametrize(("rule", "reason"), HOLDS, ids=[f"{type(r).__name__}-{n}" for n, (r, _) in enumerate(HOLDS)])
def test_a_rule(source: Source, rule: Rule, reason: str) -> None:
    found = fit.why_not(source, rule)
    assert reason in "; ".join(found)
    assert bool(found) is bool(reason)


def test_a_source_that_does_not_parse_tells_nothing_and_is_no_lack(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONTRACT, "lookup", (Has("pkg.broken", "", ("x",)),))
    (part,) = fit.examine(source, ["lookup"]).values()
    assert part.lacks == ()
    assert "does not parse" in part.unread


# -- the installed release, as it is and changed ------------------------------------------------------------------


def modules(rules: tuple[Rule, ...]) -> set[str]:
    found: set[str] = set()
    for rule in rules:
        if isinstance(rule, OneOf):
            found |= {m for _, needs in rule.ways for m in modules(needs)}
        elif isinstance(rule, Calls):
            found |= set(rule.modules)
        else:
            found.add(getattr(rule, "module", "") or rule.target.module)  # type: ignore[union-attr]
    return found


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The modules of the installed SGLang that the contract names, and what they are imported from."""
    installed = doctor.sglang_root()
    assert installed is not None
    root = tmp_path_factory.mktemp("copy")
    names = {m for rules in CONTRACT.values() for m in modules(rules)}
    utils = LOOKUP.module.rpartition(".")[0]
    names |= {"sglang.kernels.ops.moe.fused_moe_triton_kernels", f"{utils}.fused_moe_triton_kernels"}
    names.add(f"{utils}.moe_align_block_size")
    for name in names:
        path = installed.joinpath(*name.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if path.exists():
            place = root / path.relative_to(installed)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)
    lacking = {part: found.lacks for part, found in fit.examine(Source(root)).items() if found.lacks}
    assert lacking == {}, "the copy is not complete"
    return root


@pytest.mark.sglang
def test_the_installed_sglang_fits_in_every_part() -> None:
    root = doctor.sglang_root()
    assert root is not None
    parts = fit.examine(Source(root))
    assert {part: found.lacks or found.unread for part, found in parts.items() if found.lacks or found.unread} == {}
    assert set(parts) == set(CONTRACT)
    assert set(NEEDED) < set(CONTRACT)


_UTILS = "layers/moe/moe_runner/triton_utils"
_CONFIG = f"{_UTILS}/fused_moe_triton_config"
_KERNELS = "../kernels/ops/moe/fused_moe_triton_kernels"
_OLD_PLACES = {_KERNELS: f"{_UTILS}/fused_moe_triton_kernels"}
"""before SGLang 0.5.16"""
_RETURN = r"return config, \(down_config, max_block_m\)"
_TAIL = r"(def invoke_fused_moe_kernel\((?:\n    \w.*)*?\n    compute_type: .*\n)"

_RUNNER = "model_executor/runner/decode_cuda_graph_runner"
_OLD_RUNNER = "model_executor/cuda_graph_runner"

CHANGES = [
    ("hooks", "managers/scheduler", r"self\.run_batch\(", "self.run_one_batch(", ""),
    ("hooks", "managers/scheduler", r"def maybe_sleep_on_idle", "def sleep_on_idle", ""),
    ("hooks", "model_executor/model_runner", r"\.load_model\(", ".load_weights(", ""),
    ("hooks", "plugins/hook_registry", r"AROUND =", "WRAP =", ""),
    ("lookup", _CONFIG, _RETURN, "return config, down_config", ""),
    ("lookup", _CONFIG, r"(def get_config_file_name\(\n)", r"\1    device: str,\n", ""),
    ("lookup", _CONFIG, r"get_exec\b", "get_execution", "get_exec"),
    ("lookup", _CONFIG, r"\bget_server_args\b", "get_arguments", "get_server_args"),
    ("lookup", _CONFIG, r"get_global_server_args\b", "get_global_args", "get_global_server_args"),
    ("layers", "layers/moe/moe_runner/triton", r"w13_scale:", "w13_scales:", ""),
    ("layers", "layers/moe/moe_runner/base", r"no_combine: bool", "combine: bool", ""),
    ("layers", "layers/moe/utils", r"def is_triton\(", "def uses_triton(", ""),
    ("layers", f"{_UTILS}/fused_moe", r"^padding_size = ", "weight_padding = ", ""),
    ("launch", _KERNELS, r"(def invoke_fused_moe_kernel\(\n)", r"\1    stream: int,\n", ""),
    ("launch", _KERNELS, _TAIL, r"\1    schedule: object,\n", ""),
    ("launch", _KERNELS, r"@triton\.jit", "@helion.kernel", ""),
    ("launch", f"{_UTILS}/moe_align_block_size", r"num_experts: int,?\n", "num_experts: int, layout: str,\n", ""),
    ("pauses", "managers/scheduler", r"_engine_paused", "_paused_engine", ""),
    ("pauses", "managers/scheduler_components/weight_updater", r"offload_tags", "released_tags", ""),
    ("pauses", "managers/scheduler_components/weight_updater", r"_session\b", "_update", "update session"),
    ("pauses", "managers/scheduler_components/profiler_manager", r"profile_in_progress", "profiling", ""),
    ("requests", "managers/io_struct", r"class TokenizedGenerateReqInput", "class GenerateRequest", ""),
    ("batches", "managers/schedule_batch", r"extend_num_tokens\b", "prefill_tokens", ""),
    ("batches", "constants", r'"HEALTH_CHECK"', '"PROBE"', ""),
    ("arguments", "arg_groups/field_order", r'"enable_lora"', '"lora"', "declared fields"),
    ("arguments", "server_args", r"\benable_lora\b", "lora", "fields"),
    ("arguments", "arg_groups/overrides", r"_resolved_overrides", "_decisions", "resolved beside the input"),
    ("graphs", _RUNNER, r"capture_bs\b", "batch_sizes", "decode_cuda_graph_runner"),
    ("graphs", _OLD_RUNNER, r"capture_bs\b", "batch_sizes", "graph_runner"),
    ("recapture", "model_executor/runner/prefill_cuda_graph_runner", r"\bfreeze_gc\b", "collect_later", "one shape"),
    ("recapture", _OLD_RUNNER, r"\bfreeze_gc\b", "collect_later", "one batch size"),
    ("server info", "managers/io_struct", r"internal_state: ", "state: ", ""),
    ("ranks", "runtime_context", r"def get_parallel\b", "def get_spread", ""),
    ("vote", "managers/scheduler_components/request_receiver", r"\b_pull_raw_reqs\b", "_pull", ""),
]  # fmt: skip


@pytest.mark.sglang
@pytest.mark.parametrize(
    ("part", "module", "was", "now", "way"),
    CHANGES,
    ids=["-".join(filter(None, (c[0], c[3].strip(), c[4]))) for c in CHANGES],
)
def test_c39_a_later_release_that_moved_or_changed_something_is_found_out(
    copy: Path, part: Part, module: str, was: str, now: str, way: str
) -> None:
    """``way``: that of the part which the changed text belongs to, "" where all releases have it."""
    if way:
        skip_unless(part, way, f"does not go the way '{way}'")
    attributes = Source(copy).attributes("sglang.srt.managers.scheduler", "Scheduler") or set()
    if part == "ranks" and attributes & {"ps", "tp_rank"}:
        pytest.skip("this SGLang's scheduler keeps its rank itself")
    if not (copy / "sglang" / "srt" / f"{module}.py").exists():
        module = _OLD_PLACES[module]
    path = (copy / "sglang" / "srt" / f"{module}.py").resolve()
    text = path.read_text(encoding="utf-8")
    changed, count = re.subn(was, now, text, flags=re.MULTILINE)
    assert count, "the installed release has another text: mend the pattern"
    path.write_text(changed, encoding="utf-8")
    try:
        lacking = {p: found.lacks for p, found in fit.examine(Source(copy), [part, "hooks"]).items() if found.lacks}
    finally:
        path.write_text(text, encoding="utf-8")
    assert part in lacking
    assert all(reason for reasons in lacking.values() for reason in reasons)


# -- the contract is what the code does ---------------------------------------------------------------------------


def test_what_the_launch_is_called_with_is_what_the_contract_says() -> None:
    torch = pytest.importorskip("torch")
    from types import SimpleNamespace  # noqa: PLC0415 - beside torch

    from sglang_moe_autotune import layers  # noqa: PLC0415 - needs torch

    named: set[str] = set()
    quant = SimpleNamespace(**dict.fromkeys(QUANT_FIELDS))
    layer = layers.LiveLayer(torch.nn.Module(), None, "bfloat16", False, ())  # type: ignore[arg-type]
    buffers = layers.Buffers(*[torch.zeros(1, dtype=torch.bfloat16)] * len(layers.Buffers._fields))
    for gemm in ("up", "down"):
        positional, keywords = layers.gemm_call(gemm, layer, quant, buffers, 2, {})  # type: ignore[arg-type]
        assert len(positional) == len(LAUNCH_LEADING)
        named |= set(keywords)
    assert named == set(LAUNCH_NAMED)


def real_kernel_hash() -> list[object]:
    import inspect  # noqa: PLC0415 - in the other process

    from sglang_moe_autotune import releases  # noqa: PLC0415 - in the other process

    invoke = releases.invoke_function()
    return [releases.kernel_hash(invoke), list(inspect.signature(invoke).parameters)]


@pytest.mark.sglang
def test_the_kernel_hash_of_the_source_is_that_of_the_running_server(scheduler: SchedulerProcess) -> None:
    root = doctor.sglang_root()
    assert root is not None
    running, parameters = scheduler.run(real_kernel_hash)
    assert kernel_source.kernel_hash(Source(root), *LAUNCH) == running
    assert tuple(parameters[: len(LAUNCH_LEADING)]) == LAUNCH_LEADING


def dispatched() -> list[str]:
    import ast  # noqa: PLC0415 - in the other process
    import inspect  # noqa: PLC0415 - as above

    from sglang.srt.managers.scheduler import Scheduler  # noqa: PLC0415 - as above

    tree = ast.parse(inspect.getsource(inspect.getmodule(Scheduler)))  # type: ignore[arg-type]
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    calls = [n for n in calls if getattr(n.func, "id", "") == "TypeBasedDispatcher"]
    return [pair.elts[0].id for call in calls for pair in call.args[0].elts]  # type: ignore[attr-defined]


@pytest.mark.sglang
def test_every_request_that_moves_something_is_outside_of_the_harmless_ones(scheduler: SchedulerProcess) -> None:
    names = scheduler.run(dispatched)
    moves = "Weight|Memory|LoRA|Flush|Pause|Continue|Profile|Shutdown|Elastic|Rpc|HiCache(?!L3Layout)|PdRole"
    assert len(names) > 30
    assert {name for name in names if re.search(moves, name)} & HARMLESS_REQUESTS == set()
    assert len(HARMLESS_REQUESTS & set(names)) >= 10


def test_no_rule_is_there_twice() -> None:
    for part, rules in CONTRACT.items():
        assert len(set(rules)) == len(rules), part


@pytest.mark.parametrize("name", ["why_not_now", "captured_sizes", "batch_tokens", "deterministic", "setting"])
def test_attributes_that_releases_reads_by_name_are_in_the_contract(name: str) -> None:
    """A new read of SGLang in ``releases`` wants a rule here."""
    releases = pytest.importorskip("sglang_moe_autotune.releases")
    text = inspect.getsource(getattr(releases, name))
    read = set(re.findall(r'"(\w+)"', text.replace('"prefill"', "").replace('"decode"', "")))
    read |= set(re.findall(r"(?:scheduler|owner|batch|config)\.(\w+)", text))
    said = repr(CONTRACT)
    assert sorted(word for word in read if word not in said) == []


