"""Child process: the config module of the installed SGLang, as it stands, answers jobs from standard input.

It is loaded from its file, since importing its package takes the whole MoE stack. Replaced around it are only
what needs a GPU or a server's arguments: the device name, the deterministic switch and the override.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
import types
from pathlib import Path

BELOW_SGLANG = "srt/layers/moe/moe_runner/triton_utils"


def folder() -> Path:
    """Where the installed SGLang keeps the module and its shipped ``configs``; imports nothing."""
    found = importlib.util.find_spec("sglang")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("sglang")
    return Path(found.origin).parent / BELOW_SGLANG


def main() -> None:
    jobs = json.load(sys.stdin)
    spec = importlib.util.spec_from_file_location("stock_config", folder() / "fused_moe_triton_config.py")
    if spec is None or spec.loader is None:
        raise ImportError("fused_moe_triton_config")
    stock = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stock)
    deterministic = types.SimpleNamespace(enable_deterministic_inference=False)
    if hasattr(stock, "get_exec"):
        stock.get_exec = lambda: types.SimpleNamespace(deterministic=deterministic)
    else:
        name = "get_server_args" if hasattr(stock, "get_server_args") else "get_global_server_args"
        setattr(stock, name, lambda: deterministic)
    stock.get_device_name = lambda: jobs["device_name"]
    override = types.ModuleType("override")
    override.get_config = lambda: None
    sys.modules[f"sglang.{BELOW_SGLANG.replace('/', '.')}"] = override
    logging.disable(logging.CRITICAL)
    answers = {
        "names": [stock.get_config_file_name(**job) for job in jobs["names"]],
        "tables": [stock.get_moe_configs(**job) for job in jobs["tables"]],
        "lookups": [
            [stock.try_get_optimal_moe_config(**job, M=m, return_down_config=True) for m in ms]
            for job, ms in jobs["lookups"]
        ],
        "triton": stock.triton.__version__,
    }
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
