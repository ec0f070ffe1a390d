"""The classes of diffusers' networks, imported without the rest of the library.

The packages of diffusers import all their networks, pipelines' loaders, transformers, peft and torch's compiler: 3,000
modules, of which a VAE uses 300. So its modules are imported beside empty packages, which are gone afterwards.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_MODULES = {
    "AutoencoderDC": "diffusers.models.autoencoders.autoencoder_dc",
    "AutoencoderKL": "diffusers.models.autoencoders.autoencoder_kl",
    "AutoencoderKLFlux2": "diffusers.models.autoencoders.autoencoder_kl_flux2",
    "Flux2Transformer2DModel": "diffusers.models.transformers.transformer_flux2",
    "PRXTransformer2DModel": "diffusers.models.transformers.transformer_prx",
    "UNet2DConditionModel": "diffusers.models.unets.unet_2d_condition",
}
_OF_MOST = ("AutoencoderKL", "UNet2DConditionModel")
"""Classes that need none of the others, which load more of torch."""
_PACKAGES = (
    "diffusers.hooks",
    "diffusers.models.autoencoders",
    "diffusers.models.transformers",
    "diffusers.models.unets",
)
"""Packages whose own code only imports their modules."""
_ABSENT = ("accelerate", "peft", "transformers")
"""Packages that diffusers uses, where installed, for pipelines, LoRA and large models, which sdp does not."""
_COMPILER = "torch._dynamo"


@cache
def network_class(name: str) -> Any:
    """Return a class of diffusers' networks by its name.

    A process that compiles networks calls `import_compiler` before. If diffusers has been imported already, or has
    changed, its import is the usual one. Afterwards diffusers takes transformers and peft for absent: a process that
    also uses its pipelines imports diffusers first.
    """
    if "diffusers" not in sys.modules:
        try:
            with _alone():
                needed = _OF_MOST if name in _OF_MOST else _MODULES
                for module in needed:
                    import_module(_MODULES[module])
        except Exception:  # noqa: BLE001 (whatever another version of diffusers leads to)
            for module in [module for module in sys.modules if module.partition(".")[0] == "diffusers"]:
                del sys.modules[module]
    module = _MODULES[name] if _MODULES[name] in sys.modules else "diffusers"
    return getattr(import_module(module), name)


def import_compiler() -> None:
    """Import torch's compiler, so that diffusers can tell it how to treat the networks."""
    import_module(_COMPILER)


@contextmanager
def _alone() -> Iterator[None]:
    """Hide what diffusers would import beside its networks."""
    import_module("torch")
    compiler: Any = ModuleType(_COMPILER)
    compiler.allow_in_graph = compiler.disable = _unchanged
    hidden: dict[str, Any] = {_COMPILER: compiler, **dict.fromkeys(_ABSENT)}  # None: as if not installed
    hidden = {name: module for name, module in hidden.items() if name not in sys.modules}
    sys.modules |= hidden
    try:
        import_module("diffusers.models")
        for name in _PACKAGES:
            spec = find_spec(name)
            assert spec is not None
            hidden[name] = sys.modules[name] = ModuleType(name)
            hidden[name].__path__ = spec.submodule_search_locations
        yield
    finally:
        for name, module in hidden.items():
            if sys.modules.get(name, ...) is module:
                del sys.modules[name]


def _unchanged(function: Any = None, *_: Any, **__: Any) -> Any:
    """Stand in for a decorator that speaks to the compiler."""
    return _unchanged if function is None else function
