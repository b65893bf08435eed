"""Made-up weights that a model computes something with; a SGLang plugin that ``gpu_server`` gives to every server.

SGLang's own (``--load-format dummy``) lie within 0.001 of zero, those of norms too: what attention and experts add to a
token is lost in rounding, answers depend on the last token alone, and a damaged KV cache or a wrong kernel could not be
seen in them. Here norms are one, and every matrix keeps the size of what it multiplies.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

INITIALISE = "sglang.srt.model_loader.loader.initialize_dummy_weights"


def register() -> None:
    """The entry point."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415 - where SGLang is

    HookRegistry.register(INITIALISE, enliven, HookType.AROUND)


def enliven(original: Callable[..., Any], model: Any, *args: Any, **named: Any) -> None:
    """AROUND ``initialize_dummy_weights``. Tensors of equal name and size are equal, on every rank of a server too:
    what ranks hold copies of must be the same. Scales, biases and what is below 16 bits stay SGLang's."""
    import torch  # noqa: PLC0415 - servers only

    original(model, *args, **named)
    # These multiply by one more than their weight, some of SGLang's paths by a sum that was made before this.
    above_one = {f"{name}.weight" for name, part in model.named_modules() if type(part).__name__.startswith("Gemma")}
    for name, tensor in model.state_dict().items():
        if not torch.is_floating_point(tensor) or torch.finfo(tensor.dtype).bits < 16 or "scale" in name:
            continue
        if tensor.dim() == 1 and "norm" in name:
            tensor.fill_(0.0 if name in above_one else 1.0)
        elif tensor.dim() > 1:
            most = (3.0 / tensor.shape[-1]) ** 0.5  # of this width the standard deviation is 1 / sqrt(inputs)
            generator = torch.Generator(device=tensor.device).manual_seed(zlib.crc32(name.encode()))
            tensor.uniform_(-most, most, generator=generator)
