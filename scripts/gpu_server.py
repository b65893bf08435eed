"""A real SGLang server on a random-weight MoE model, for the scripts that need one."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path


_LIBC = ctypes.CDLL(None)


class Model(NamedTuple):
    """A Qwen3-MoE of few layers; the defaults are a shape that SGLang ships no file for on an H200."""

    experts: int = 256
    intermediate: int = 256
    hidden: int = 3072
    top_k: int = 8
    layers: int = 4

    def write(self, folder: Path) -> Path:
        """Write ``config.json``; the server makes the weights up (``--load-format dummy``)."""
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


FLAGS = (
    *("--load-format", "dummy", "--skip-tokenizer-init"),
    *("--attention-backend", "triton", "--sampling-backend", "pytorch"),
    *("--moe-runner-backend", "triton", "--grammar-backend", "none"),
)


def _die_with_parent() -> None:
    """A server has a session of its own, so nothing else would end it where the script is killed."""
    _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; SGLang's own processes ask for the same


class Server:
    """Starts the server, waits until it is healthy, and ends it by its process id.

    ``started_s``: seconds from start to the first healthy answer. Raises RuntimeError with the end of the log
    if it ends or is not healthy in time.
    """

    def __init__(
        self, model: Path, port: int, log: Path, environ: dict[str, str], flags: tuple[str, ...] = (), wait_s: int = 400
    ) -> None:
        self.port, self.log = port, log
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(port)]
        own = {"HF_HUB_OFFLINE": "1", "SGLANG_DISABLE_CUDNN_CHECK": "1", "PYTHONUNBUFFERED": "1"}
        begun = time.monotonic()
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, *FLAGS, *flags],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **own, **environ},
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - one call of the kernel, loaded before
            )
        try:
            while not self._healthy():
                self._check(begun, wait_s)
                time.sleep(0.2)
        except BaseException:
            self.stop()
            raise
        self.started_s = time.monotonic() - begun

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

    def stop(self) -> None:
        """End the server and what it started: its own process group."""
        if self.process.poll() is not None:
            return
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
