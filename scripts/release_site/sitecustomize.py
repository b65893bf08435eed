"""On the path of a process that imports an older SGLang: lets it name a model that Transformers names by now too.

The test environment has the Transformers of the newest release; an older one adds models of its own to it and stops
where the name is taken. None of these models matters here.
"""

import importlib.util
import sys
import types
from unittest import mock

if any("multiprocessing" in argument for argument in sys.orig_argv):
    from transformers.models.auto import configuration_auto

    _register = configuration_auto._LazyConfigMapping.register

    def _register_again(mapping: object, key: object, value: object, exist_ok: bool = False) -> None:
        del exist_ok
        _register(mapping, key, value, exist_ok=True)

    configuration_auto._LazyConfigMapping.register = _register_again

    class _Kernels(types.ModuleType):
        """sgl_kernel, which needs CUDA and which releases before 0.5.13 import at once: every name is there."""

        def __getattr__(self, name: str) -> object:
            if name.startswith("__"):
                raise AttributeError(name)
            return mock.MagicMock(name=name)

    class _Finder:
        def find_spec(self, name: str, _path: object = None, _target: object = None) -> object:
            if name.partition(".")[0] == "sgl_kernel":
                return importlib.util.spec_from_loader(name, self, is_package=True)
            return None

        def create_module(self, spec: object) -> types.ModuleType:
            return _Kernels(spec.name)

        def exec_module(self, module: object) -> None:
            """There is nothing in it."""

    sys.meta_path.append(_Finder())  # the last to be asked: a real one comes first
