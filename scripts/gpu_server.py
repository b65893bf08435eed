"""A real SGLang server on a random-weight MoE model, for the scripts that need one."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # this checkout, whether it is installed or another version of it


_LIBC = ctypes.CDLL(None)


class Model(NamedTuple):
    """A Qwen3-MoE of few layers; the defaults are a shape that SGLang ships no file for on an H200."""

    experts: int = 256
    intermediate: int = 256
    hidden: int = 3072
    top_k: int = 8
    layers: int = 4

    def write(self, folder: Path) -> Path:
        """Write ``config.json``; the server makes the weights up (``--load-format dummy``, see ``lively_weights``)."""
        config = {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "torch_dtype": "bfloat16",
            "vocab_size": 32000,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "max_window_layers": self.layers,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "hidden_act": "silu",
            "intermediate_size": 6144,
            "moe_intermediate_size": self.intermediate,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "router_aux_loss_coef": 0.001,
            "max_position_embeddings": 40960,
            "rope_theta": 1000000.0,
            "rms_norm_eps": 1e-6,
            "initializer_range": 0.02,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        return folder


MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""Of several GPUs: NVLink multicast is left alone on a machine whose GPUs others share. Only where nothing is set."""

FEWER_SIZES = (
    *("--chunked-prefill-size", "2048", "--cuda-graph-bs-decode", *map(str, (1, 2, 4, 8, 12, 16))),
    "--cuda-graph-bs-prefill",
    *map(str, (32, 48, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)),
)
"""24 captured sizes: a start takes less, and there is a minute of idle time's work to learn all"""

READY = "The server is fired up and ready to roll"

_STARTED = re.compile(
    r"\[\d{4}-\d\d-\d\d [\d:.]+(?: TP(\d+))?(?: EP\d+)?\] MoE autotune \S+: hooks in place; .*?learned rows: (\d+);"
)

FLAGS = (
    *("--load-format", "dummy", "--skip-tokenizer-init"),
    *("--attention-backend", "triton", "--sampling-backend", "pytorch"),
    *("--moe-runner-backend", "triton", "--grammar-backend", "none"),
)


def rows_at_start(log: str) -> dict[int, int]:
    """Learned rows that each rank's lookups answered from before graphs were captured, by the start lines of a log. In
    mode ``read-only`` nothing else tells: no live file is written then."""
    return {int(rank or 0): int(rows) for rank, rows in _STARTED.findall(log)}


def install(site: Path, name: str, *modules: str) -> None:
    """Make modules of this folder a SGLang plugin for processes with ``site`` in PYTHONPATH: the first one has
    ``register``."""
    add_entry_point(site, name, "0", f"{name} = {modules[0]}:register")
    for module in modules:
        shutil.copy(ROOT / "scripts" / f"{module}.py", site)


def add_entry_point(site: Path, package: str, version: str, point: str) -> None:
    """Have importlib.metadata find a plugin of SGLang's in ``site``, as of a package that is installed there."""
    info = site / f"{package}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    name = package.replace("_", "-")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{point}\n")


@functools.cache
def plugins() -> Path:
    """A folder for PYTHONPATH from which SGLang finds the made-up weights, a probe that says nothing unless it is asked
    to, and this package where this Python does not know it already."""
    site = Path(tempfile.gettempdir()) / f"moe-autotune-plugins-{os.getpid()}"
    install(site, "lively_weights", "lively_weights")
    install(site, "pass_probe", "pass_probe", "call_watch")
    if not any(point.name == "moe_autotune" for point in importlib.metadata.entry_points(group="sglang.srt.plugins")):
        from sglang_moe_autotune import __version__ as version  # noqa: PLC0415 - found on the path that is set above

        # Under its own name, so that it counts once where another folder has it too.
        point = "moe_autotune = sglang_moe_autotune.plugin:register"
        add_entry_point(site, "sglang_moe_autotune", version, point)
    return site


def long_passes(folder: Path) -> list[dict[str, Any]]:
    """What ``pass_probe.py`` has noted there, of all processes."""
    notes = [path.read_text(encoding="utf-8").splitlines() for path in sorted(folder.glob("long-*.jsonl"))]
    return [json.loads(line) for lines in notes for line in lines]


def with_checkout(environ: dict[str, str]) -> dict[str, str]:
    """These variables, by which a process finds this checkout before anything else."""
    path = [str(ROOT), str(plugins()), *filter(None, [environ.get("PYTHONPATH")])]
    return {**environ, "PYTHONPATH": os.pathsep.join(path)}


def _die_with_parent() -> None:
    """A server has a process group of its own, so nothing else would end it where the script is killed."""
    _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; SGLang's own processes ask for the same


class Server:
    """Starts the server, waits until it is healthy, and ends it by its process id.

    ``started_s``: seconds from start to the first healthy answer, which takes a second of its own. ``ready_s``: to the
    line of the log that says so; 0 where there was none. Raises RuntimeError with the end of the log if it ends or is
    not healthy in time.
    """

    def __init__(
        self, model: Path, port: int, log: Path, environ: dict[str, str], flags: tuple[str, ...] = (), wait_s: int = 400
    ) -> None:
        self.port, self.log = port, log
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(port)]
        self._stopped, self.ready_s = False, 0.0
        own = {"HF_HUB_OFFLINE": "1", "SGLANG_DISABLE_CUDNN_CHECK": "1", "PYTHONUNBUFFERED": "1"}
        begun = time.monotonic()
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, *FLAGS, *flags],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=with_checkout({**MULTICAST_OFF, **os.environ, **own, **environ}),
                process_group=0,  # of its own, to be ended as a whole; in this session, which may be ended from outside
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - one call of the kernel, loaded before
            )
        try:
            while not (self._ready(begun) and self._healthy()):
                self._check(begun, wait_s)
                time.sleep(0.1)
        except BaseException:
            self.stop()
            raise
        self.started_s = time.monotonic() - begun

    def _ready(self, begun: float) -> bool:
        """Is it worth to ask for its health? Where the log does not tell, from half a minute on."""
        taken_s = time.monotonic() - begun
        if not self.ready_s and READY in self.text():
            self.ready_s = taken_s
        return self.ready_s > 0 or taken_s > 30

    def _check(self, begun: float, wait_s: float) -> None:
        taken_s = time.monotonic() - begun
        if self.process.poll() is not None or taken_s > wait_s:
            raise RuntimeError(f"the server is not healthy after {taken_s:.0f} s:\n{self.text()[-3000:]}")

    def __enter__(self) -> Server:  # noqa: PYI034 - Self is in typing from Python 3.11 on
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def text(self) -> str:
        """The log so far."""
        return self.log.read_text(errors="replace")

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 120.0) -> Any:
        """POST JSON; the answer as JSON, or as text where it is none."""
        data = json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            text = answer.read().decode()
        try:
            return json.loads(text)
        except ValueError:
            return text

    def get(self, path: str, timeout_s: float = 30.0) -> Any:
        """GET JSON."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=timeout_s) as answer:
            return json.loads(answer.read())

    def generate(self, tokens: list[int] | list[list[int]], new_tokens: int) -> Any:
        """Greedy completion of one prompt or a batch of them, given as token ids."""
        parameters = {"max_new_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True}
        return self.post("/generate", {"input_ids": tokens, "sampling_params": parameters})

    def flush(self, wait_s: float = 60.0) -> None:
        """Empty the radix cache once nothing runs any more; refused before that, also right after an answer. Raises
        TimeoutError where a request never ends."""
        end = time.monotonic() + wait_s
        while time.monotonic() < end:
            with contextlib.suppress(urllib.error.HTTPError):
                self.post("/flush_cache", {})
                return
            time.sleep(0.1)
        raise TimeoutError(f"the server is not idle after {wait_s:.0f} s")

    def rest(self) -> None:
        """Have the plugin launch nothing more, so that the end to come is none in the middle of a first launch, of
        which two make the next start on the same store read-only."""
        with contextlib.suppress(OSError):
            self.post("/set_internal_state", {"server_args": {"moe_autotune": 1}}, timeout_s=20)
            time.sleep(0.3)

    def stop(self) -> None:
        """End the server and what it started: its own process group, also where the launcher ended before it."""
        if self._stopped:
            return
        self._stopped = True
        for number, wait_s in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(wait_s)
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False
