"""Read the data type of the KV cache that a quantised checkpoint declares.

made by           declares an 8-bit cache by                           vLLM applies it to
llm-compressor    `kv_cache_scheme`                                    K and V, not a latent
ModelOpt          `kv_cache_scheme`, or `kv_cache_quant_algo`          every cache
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_OF_MODELOPT: Final = {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}


def declared_kv_dtype(fields: Mapping[str, object], *, is_latent: bool) -> str | None:
    """Return the dtype that vLLM's `--kv-cache-dtype auto` takes from a config.

    Args:
        fields: of the `config.json`.
        is_latent: whether attention keeps a latent (MLA).

    Returns:
        The dtype as vLLM names it; None for that of the weights.
    """
    given = fields.get("quantization_config")
    quantization = _mapping(fields.get("compression_config") if given is None else given)
    inner = _mapping(quantization.get("quantization"))
    method = str(quantization.get("quant_method") or "").lower().replace("_", "-")
    if method.startswith("modelopt") or _is_by_modelopt(quantization, inner):
        return _of_modelopt(quantization, inner or quantization)
    if method == "compressed-tensors" and quantization.get("kv_cache_scheme") and not is_latent:
        return "fp8"
    return None


def _is_by_modelopt(quantization: Mapping[str, object], inner: Mapping[str, object]) -> bool:
    """Return whether a config without a method is one of ModelOpt."""
    producer = _mapping(quantization.get("producer"))
    is_named = producer.get("name") == "modelopt" or "modelopt_quant_config" in inner
    return is_named and bool(inner.get("quant_algo"))


def _of_modelopt(quantization: Mapping[str, object], inner: Mapping[str, object]) -> str | None:
    declared = (
        inner.get("kv_cache_scheme")
        or quantization.get("kv_cache_scheme")
        or inner.get("kv_cache_quant_algo")
        or quantization.get("kv_cache_quant_algo")
    )
    if isinstance(declared, str):
        return _OF_MODELOPT.get(declared.lower())
    scheme = _mapping(declared)
    if scheme.get("type") != "float":
        return None
    match scheme.get("num_bits"), scheme.get("dynamic"):
        case 8, False:
            return "fp8_e4m3"
        case 4, _:
            return "nvfp4"
    return None


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}
