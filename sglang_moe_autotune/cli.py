"""The command ``sglang-moe-autotune``: its group, the commands that only read, and the list of all others."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sglang_moe_autotune import (
    __version__,
    doctor,
    editing,
    explaining,
    exporting,
    figures,
    importing,
    matrix,
    objects,
    offline_cli,
    quarantine_cli,
    report,
    selection,
    shell,
    summary,
    switching,
    trials,
    watch,
)
from sglang_moe_autotune.selection import NothingFound, Unusable

if TYPE_CHECKING:
    from sglang_moe_autotune.noise import NoiseModel


@click.group(
    doctor.DISTRIBUTION,
    cls=shell.Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="\b\nExit codes: 0 ok; 1 nothing found, or not healthy; 2 wrong usage;\n"
    "3 a file, folder or server cannot be read or written as it must.",
)
@click.version_option(__version__)
def main() -> None:
    """What sglang-moe-autotune has learned on this machine, and what its servers are doing."""


main.add_command(watch.status_command)
main.add_command(switching.off_command)
main.add_command(switching.on_command)


@main.command(
    "list",
    short_help="Stored shapes, a line each, with their gains.",
    epilog=shell.example("list", "list --environment H200 --json"),
)
@shell.options("dir", "environment", "json")
def list_command(folder: Path | None, environment: str | None, *, as_json: bool) -> None:
    """Stored shapes, a line each: the counts of M by outcome, and gains.

    \b
    faster    a pair was measured faster than SGLang's answer, and is served
    baseline  the search has ended, and SGLang's own answer stays
    untuned   served, but no search has ended there yet
    replayed  of a recording, as in the demo: never served where a GPU is
    best      the largest gain in the time of up + down, where faster
    mean      the geometric mean of those gains
    """
    found = [
        (file, summary.summarise(file.contents.records, file.contents.notes))
        for file in selection.opened(shell.root(folder), environment)
    ]
    if as_json:
        listed = [objects.environment_summary(f.path, f.contents.environment, s) for f, s in found]
        shell.emit({"environments": listed})
    else:
        from sglang_moe_autotune import tables  # noqa: PLC0415 - rich, which --json does without

        for file, summaries in found:
            shell.show(file.title, tables.shapes(summaries))
    if not any(summaries for _, summaries in found):
        raise NothingFound("no shape is stored yet: let a server run with the plugin")


for _command in (
    explaining.show_command,
    explaining.explain_command,
    exporting.export_command,
    importing.import_command,
    editing.merge_command,
    editing.pin_command,
    editing.forget_command,
    offline_cli.tune,
    offline_cli.verify,
    quarantine_cli.quarantine_command,
):
    main.add_command(_command)


@main.command(
    "report",
    short_help="One HTML page with plots of what was learned.",
    epilog=shell.example("report -o report.html", "report --environment H200 --json"),
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write; without it the page goes to standard output.",
)
@shell.options("dir", "environment", "json")
def report_command(output: Path | None, folder: Path | None, environment: str | None, *, as_json: bool) -> None:
    """One self-contained HTML page of the store: gain by M, times, configs, GPU seconds, what was kept, history.

    It loads nothing from a network. With --json the figures behind the plots are printed in its place.
    """
    root = shell.root(folder)
    files = selection.opened(root, environment)
    pages = [figures.gather(f.title, f.contents, trials.read(root, f.contents.environment)) for f in files]
    if not any(page.shapes for page in pages):
        raise NothingFound("no shape is stored yet: let a server run with the plugin")
    if as_json:
        shell.emit({"environments": [objects.report(page) for page in pages]})
        if output is None:
            return
    text = report.page(pages)
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Unusable(f"{output} cannot be written ({error.strerror}): choose another file") from error
    click.echo(f"{output}: {len(text) / 1024:.0f} KiB", err=True)


@main.command(
    "doctor",
    short_help="Can a server that is started here tune?",
    epilog=shell.example("doctor", "doctor --json", "doctor --matrix"),
)
@click.option("--matrix", "releases", is_flag=True, help="The releases of SGLang that were checked, and the one here.")
@shell.options("dir", "json")
def doctor_command(folder: Path | None, *, releases: bool, as_json: bool) -> None:
    """Check this machine and this Python: can a server started from here tune?

    Imports neither SGLang nor torch. Exits with 1 if a check fails; warnings are no failure.
    """
    if releases:
        _show_releases(as_json=as_json)
        return
    rows = doctor.examine(shell.environ(folder))
    if as_json:
        shell.emit(objects.checks(rows))
    else:
        from sglang_moe_autotune import tables  # noqa: PLC0415 - rich, which --json does without

        shell.show(tables.checks(rows))
    if any(row.health == "fail" for row in rows):
        sys.exit(NothingFound.exit_code)


def _show_releases(*, as_json: bool) -> None:
    checked, here = matrix.load(), doctor.installed()
    if as_json:
        shell.emit(objects.releases(checked, here))
    else:
        from sglang_moe_autotune import tables  # noqa: PLC0415 - rich, which --json does without

        shell.show(*tables.releases(checked, here))
    if here is not None and here.state in {"aside", "unsupported"}:
        sys.exit(NothingFound.exit_code)


@main.command(
    "simulate",
    short_help="Run the real search on a recorded landscape.",
    epilog=shell.example("simulate landscape.json.gz --seed 7 --noise 2"),
)
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--noise",
    "noise_percent",
    metavar="PERCENT",
    type=shell.Number(0, 100),
    default=2.0,
    show_default=True,
    help="Noise that is put on the recorded times.",
)
@click.option(
    "--noise-model",
    type=click.Choice(["launch", "idle"]),
    default="launch",
    show_default=True,
    help="idle adds what an idle GPU does: clocks that drift and step, cold first launches, launches held up.",
)
@click.option(
    "--budget-s", type=shell.Number(min=0, min_open=True), help="GPU seconds to spend; no cap without it."
)
@shell.options("json")
def simulate_command(
    file: Path, seed: int, noise_percent: float, noise_model: NoiseModel, budget_s: float | None, *, as_json: bool
) -> None:
    """Run the real search on FILE, a recorded landscape, in place of a GPU."""
    from sglang_moe_autotune import landscape, simulate  # noqa: PLC0415 - no other command needs them

    try:
        recorded = landscape.load(file)
    except OSError as error:
        raise Unusable(f"{file} cannot be read ({error.strerror}): check its permissions") from error
    except ValueError as error:
        raise Unusable(str(error)) from error
    result = simulate.simulate(recorded, seed, noise_percent, budget_s, noise_model=noise_model)
    if as_json:
        shell.emit(result)
    else:
        from sglang_moe_autotune import tables  # noqa: PLC0415 - rich, which --json does without

        shell.show(*tables.simulation(result))


if __name__ == "__main__":
    main()
