"""The simulation: the real tuner on a recorded landscape, and how near it came to the exhaustive best."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_moe_autotune.prior import ConfigFile, Prior, find_files
from sglang_moe_autotune.replay import ReplayProvider
from sglang_moe_autotune.shapes import GEMMS
from sglang_moe_autotune.tuner import Tuner, TunerOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang_moe_autotune.landscape import Landscape
    from sglang_moe_autotune.noise import NoiseModel
    from sglang_moe_autotune.records import Record

_CONFIG_FOLDERS = ("srt/layers/moe/moe_runner/triton_utils/configs", "srt/layers/moe/fused_moe_triton/configs")
_WAIT_S = 0.02
_EXPLAINED_FIELDS = ("E", "N", "K", "top_k", "dtype", "block_shape", "per_channel_quant", "slug")


def simulate(
    landscape: Landscape,
    seed: int = 0,
    noise_percent: float = 2.0,
    budget_s: float | None = None,
    *,
    noise_model: NoiseModel = "launch",
    prior: Prior | None = None,
    order: Sequence[int] | None = None,
    options: TunerOptions | None = None,
    learned: Callable[[Record, ReplayProvider], object] | None = None,
) -> dict[str, Any]:
    """Tune every M of the landscape, or as many as ``budget_s`` simulated GPU seconds allow.

    Latencies in the result are up + down in microseconds without noise; regret = chosen/best - 1 over pairs with
    one BLOCK_SIZE_M. order: the M, hottest first; as recorded without it. prior: from the installed SGLang's files
    where there is one. learned: told of each record as it is made.
    """
    provider = ReplayProvider(landscape, seed, noise_percent, noise_model=noise_model)
    records: dict[int, Record] = {}

    def keep(record: Record) -> None:
        records[record.M] = record
        if learned is not None:
            learned(record, provider)

    tuner = Tuner(
        provider,
        keep,
        prior if prior is not None else installed_prior(landscape.device_name),
        options or TunerOptions(seed=seed, source="replayed"),
        space=lambda _: landscape.candidates,
        clock=provider.clock,
        unix_clock=lambda: 0.0,
    )
    ms = tuple(order if order is not None else landscape.ms)
    for place, M in enumerate(ms):  # noqa: N806
        tuner.add(landscape.shape, M, landscape.baselines[M].pair)
        tuner.heat(landscape.shape, M, len(ms) - place)
    while budget_s is None or provider.gpu_s < budget_s:
        result = tuner.step(deep_idle=True)
        if result == "nothing":
            break
        if result == "waiting":
            provider.wait(_WAIT_S)
    return _result(landscape, records, provider, tuner, seed)


def installed_prior(device_name: str) -> Prior:
    """The prior of the SGLang installed here, found without importing it; an empty one without SGLang."""
    return Prior(installed_files(), device_name)


def installed_files() -> tuple[ConfigFile, ...]:
    """The config files of the SGLang installed here, found without importing it."""
    spec = find_spec("sglang")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for folder in _CONFIG_FOLDERS:
            if files := find_files(Path(root) / folder):
                return files
    return ()


def _result(
    landscape: Landscape, records: dict[int, Record], provider: ReplayProvider, tuner: Tuner, seed: int
) -> dict[str, Any]:
    per_m, configs, regrets = {}, {}, []
    measured, spent_s = tuner.experience(landscape.shape).measured, tuner.gpu_s_per_m(landscape.shape)
    for M in landscape.ms:  # noqa: N806
        baseline, record = landscape.baselines[M], records.get(M)
        pair = record.pair if record else baseline.pair
        chosen_us, best_us = landscape.pair_us(M, pair), landscape.best(M)[1]
        regrets.append(chosen_us / best_us - 1)
        per_m[str(M)] = {
            "baseline_us": baseline.up_us + baseline.down_us,
            "chosen_us": chosen_us,
            "best_us": best_us,
            "regret": regrets[-1],
            "measured": len({trial.config for trial in measured.get(M, ())}),
            "gpu_s": spent_s.get(M, 0.0),
            "accepted": record is not None and record.verdict == "faster",
        }
        configs[str(M)] = {gemm: pair.of(gemm).to_dict() for gemm in GEMMS}
    ordered = sorted(regrets)
    return {
        "shape": {field: getattr(landscape.shape, field) for field in _EXPLAINED_FIELDS},
        "per_m": per_m,
        "regret_geomean": math.exp(sum(map(math.log1p, regrets)) / len(regrets)) - 1,
        "regret_p95": ordered[max(0, math.ceil(0.95 * len(ordered)) - 1)],
        "gpu_s": provider.gpu_s,
        "compiled": len(provider.compiled),
        "seed": seed,
        "configs": configs,
    }
