"""Read the kinds of a model's layers, and what each keeps, from a Hugging Face `config.json`.

kind               keeps                                  fields
full attention     K and V of every token                 num_key_value_heads, head_dim
latent (MLA)       one vector per token, for all heads    kv_lora_rank, qk_rope_head_dim
sliding window     as full attention, near tokens only    sliding_window
local chunk        as full attention, the chunk only      attention_chunk_size
recurrent state    a state per prompt, not per token      mamba_* or linear_*
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from kvstow._core import ConfigError
from kvstow.geometry.model_types import (
    DEFAULTS,
    FULL_BELOW,
    LANGUAGE_MODELS,
    LATENT_TYPES,
    ONE_TOKEN_MORE,
    WINDOW_PERIODS,
)
from kvstow.geometry.quantization import declared_kv_dtype

Kind = Literal["full", "window", "chunk", "state"]
_MAX = 2**31 - 1
_MAX_LAYERS = 10_000
# Fields that a model of several models may have outside of its language model.
_OF_THE_WHOLE: Final = ("dtype", "torch_dtype", "quantization_config", "compression_config")

# The names of `layer_types`, and what a layer of that name keeps; None keeps nothing.
_KINDS: Final[Mapping[str, Kind | None]] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "chunk",
    "mamba": "state",
    "linear_attention": "state",
    "mlp": None,
    "moe": None,
}
_PATTERN_LETTERS: Final = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
# Architectures whose tokens attend to later ones. No other field of BERT's config says so.
_ENCODER: Final = re.compile("Bert|Roberta|Electra|Gte|Bidirectional|Encoder")
_DECODER: Final = re.compile("ForCausalLM$|LMHeadModel$")
# Their `config.json` may leave out `state_size`.
_STATES_ONLY: Final = {"falcon_mamba", "mamba", "mamba2"}
_SPARSE_INDEX: Final = (
    "index_topk",
    "compress_ratios",
    "index_head_dim",
    "sparse_attention_config",
)
# Fields of models whose layers differ in ways that `ModelConfig` cannot hold: a plan that ignored
# them would be wrong by as much as ten times.
_UNCOUNTED: Final = (
    "attn_type_list",
    "block_configs",
    "block_types",
    "conv_L_cache",
    "cross_attention_layers",
    "global_head_dim",
    "hybrid_layer_ids",
    "hybrid_layer_pattern",
    "layer_group_size",
    "linear_attn_config",
    "loop_num",
    "n_recurrent_loops",
    "num_attention_groups",
    "num_global_key_value_heads",
    "num_kv_shared_layers",
    "per_layer_config",
    "swa_head_dim",
    "swa_num_key_value_heads",
)


@dataclass(frozen=True, slots=True)
class StateSize:
    """The size of a recurrent layer's state, in values.

    Attributes:
        inner_channels: channels of the convolution that tensor parallelism divides.
        group_channels: channels of the convolution per group of heads.
        num_groups: groups of heads, of which each rank has at least one.
        conv_tokens: tokens that the convolution keeps.
        num_heads: heads, which tensor parallelism divides.
        head_values: values of a head's recurrent state.
    """

    inner_channels: int
    group_channels: int
    num_groups: int
    conv_tokens: int
    num_heads: int
    head_values: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What a model's layers keep of each token, or of each prompt.

    Attributes:
        name: the preset, or the path of the file.
        layers: the kind of each layer that keeps something, in order.
        num_kv_heads: heads of K and V in an attention layer; 1 for a latent.
        head_values: values per token and head of an attention layer: K and V, or the latent.
        is_latent: whether attention keeps a latent (MLA), which every rank holds whole.
        window: tokens of the sliding windows.
        chunk: tokens of the local chunks.
        state: size of a recurrent state; None without one.
        dtype: the dtype of the weights; None if the file names none.
        kv_dtype: the dtype of the KV cache that a quantised model declares; None for that of the
            weights.
        state_dtype: the dtype of the recurrent part of a state; None for that of the weights.
        num_heads: attention heads, which tensor parallelism divides; 0 if the file names none.
    """

    name: str
    layers: tuple[Kind, ...]
    num_kv_heads: int
    head_values: int
    is_latent: bool = False
    window: int = 0
    chunk: int = 0
    state: StateSize | None = None
    dtype: str | None = None
    kv_dtype: str | None = None
    state_dtype: str | None = None
    num_heads: int = 0

    @property
    def num_layers(self) -> Counter[Kind]:
        """Number of layers of each kind."""
        return Counter(self.layers)


def read_config(path: Path) -> ModelConfig:
    """Read a `config.json`.

    Raises:
        ConfigError: the file cannot be read, is no JSON object, or lacks a field.
    """
    fields = _read_object(path)
    beside = path.with_name("hf_quant_config.json")
    if fields.get("quantization_config") is None and beside.is_file():  # ModelOpt before 0.31
        fields["quantization_config"] = _read_object(beside)
    return parse_config(str(path), fields)


def _read_object(path: Path) -> dict[str, object]:
    try:
        fields = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not a JSON object ({error}): pass a config.json") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{path}: not a JSON object: pass a model's config.json")
    return fields


def parse_config(name: str, fields: Mapping[str, object]) -> ModelConfig:
    """Return what a config says; that of the language model if there are several."""
    for field in LANGUAGE_MODELS:
        if isinstance(inner := fields.get(field), dict) and "num_hidden_layers" not in fields:
            # Transformers names the language model after the whole, unless its own type is given.
            own_type = {"model_type": f"{fields.get('model_type')}_text"}
            whole = {key: fields[key] for key in _OF_THE_WHOLE if fields.get(key) is not None}
            return parse_config(name, own_type | inner | whole)  # vLLM, too, asks the whole first
    return _Fields(name, fields).model()


class _Fields:
    """The fields of a config, with errors that name the file and the field."""

    def __init__(self, name: str, fields: Mapping[str, object]) -> None:
        self._name = name
        model_type = fields.get("model_type")
        defaults = DEFAULTS.get(model_type, {}) if isinstance(model_type, str) else {}
        self._fields = {**defaults, **fields}

    def model(self) -> ModelConfig:
        """Return the model, or raise `ConfigError`."""
        for field in _SPARSE_INDEX:
            if self._fields.get(field) is not None:
                raise ConfigError(
                    f"{self._name}: has {field!r}, so its attention keeps an index that kvstow "
                    "cannot count: pass a model without sparse attention"
                )
        for field in _UNCOUNTED:
            if self._fields.get(field) and not self._has_full_attention_only(field):
                raise self._uncounted(field)
        self._check_is_decoder()
        if self._fields.get("state_size") or self._text("model_type") in _STATES_ONLY:
            raise self._without_attention()
        layers = self._layers()
        kinds = set(layers)
        if not kinds - {"state"}:
            raise self._without_attention()
        latent_values = self._latent_values()
        heads = 1 if latent_values else self._kv_heads()
        return ModelConfig(
            self._name,
            layers,
            heads,
            latent_values or 2 * self._head_size(),
            is_latent=latent_values > 0,
            window=self._window() if "window" in kinds else 0,
            chunk=self._count("attention_chunk_size") if "chunk" in kinds else 0,
            state=self._state() if "state" in kinds else None,
            dtype=self._text("dtype") or self._text("torch_dtype"),
            kv_dtype=declared_kv_dtype(self._fields, is_latent=latent_values > 0),
            state_dtype=self._state_dtype(),
            num_heads=self._count("num_attention_heads", 0),
        )

    def _check_is_decoder(self) -> None:
        """Refuse models in which a token attends to later ones: vLLM caches no prefix of them."""
        names = [str(name) for name in self._list("architectures")]
        is_encoder = any(map(_ENCODER.search, names)) and not any(map(_DECODER.search, names))
        if is_encoder or self._fields.get("is_encoder_decoder"):
            raise ConfigError(
                f"{self._name}: has an encoder, and kvstow counts decoders only: pass the "
                "config.json of a decoder model"
            )

    def _has_full_attention_only(self, field: str) -> bool:
        """Whether the field says 1, which is full attention in each layer."""
        if field == "attn_type_list":  # MiniMax
            return all(kind == 1 for kind in self._list(field))
        counts = {"layer_group_size", "loop_num", "n_recurrent_loops"}
        return field in counts and self._fields[field] == 1

    def _without_attention(self) -> ConfigError:
        return ConfigError(
            f"{self._name}: no layer has attention, and kvstow derives vLLM's block size from "
            "an attention layer: pass a model with attention"
        )

    def _uncounted(self, field: str) -> ConfigError:
        return ConfigError(
            f"{self._name}: has {field!r}, so its layers keep KV that kvstow cannot count: pass "
            "another model, or --bytes-per-token for a plan with full attention only"
        )

    def _count(self, field: str, default: int | None = None) -> int:
        value = self._fields.get(field)
        if value is None:
            if default is not None:
                return default
            raise ConfigError(
                f"{self._name}: no {field!r}: pass the config.json of a decoder model, or add the "
                "field"
            )
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX:
            raise ConfigError(f"{self._name}: {field} is {value!r}; it must be 1 to {_MAX}")
        return value

    def _list(self, field: str) -> list[object]:
        value = self._fields.get(field)
        if value is not None and not isinstance(value, list):
            raise ConfigError(f"{self._name}: {field} is {value!r}; it must be a list")
        return value or []

    def _text(self, field: str) -> str | None:
        value = self._fields.get(field)
        return value.removeprefix("torch.") if isinstance(value, str) else None

    def _kv_heads(self) -> int:
        heads = self._count("num_attention_heads")
        # Falcon has names of its own.
        if self._fields.get("multi_query") and not self._fields.get("new_decoder_architecture"):
            return 1
        if self._fields.get("multi_query_attention"):  # ChatGLM
            return self._count("multi_query_group_num")
        return self._count("num_key_value_heads", self._count("num_kv_heads", heads))

    def _head_size(self) -> int:
        if self._is_minicpm3:
            return self._count("qk_nope_head_dim") + self._count("qk_rope_head_dim")
        if self._fields.get("head_dim") is not None:
            return self._count("head_dim")
        hidden, heads = self._count("hidden_size"), self._count("num_attention_heads")
        if hidden < heads:
            raise ConfigError(
                f"{self._name}: hidden_size is {hidden}; it must be at least the {heads} "
                "attention heads: add 'head_dim' if the heads have another size"
            )
        return hidden // heads

    def _latent_values(self) -> int:
        if self._fields.get("kv_lora_rank") is None or self._is_minicpm3:
            return 0
        model_type = self._text("model_type")
        if model_type not in {None, *LATENT_TYPES}:
            raise ConfigError(
                f"{self._name}: has 'kv_lora_rank' and model_type {model_type!r}; kvstow counts a "
                f"latent for {', '.join(LATENT_TYPES)}: pass another model, or --bytes-per-token"
            )
        return self._count("kv_lora_rank") + self._count("qk_rope_head_dim")

    @property
    def _is_minicpm3(self) -> bool:
        """Whether vLLM keeps whole heads although the config has a latent's fields."""
        return self._text("model_type") == "minicpm3"

    # -- layers --------------------------------------------------------------------------------

    def _layers(self) -> tuple[Kind, ...]:
        named = self._named_layers()
        # Nemotron-H, as transformers saves it, has the list alone.
        num_layers = self._count("num_hidden_layers", None if named is None else len(named))
        if num_layers > _MAX_LAYERS:
            raise ConfigError(
                f"{self._name}: num_hidden_layers is {num_layers}; it must be at most "
                f"{_MAX_LAYERS}: pass a model's config.json"
            )
        names = self._unnamed_layers(range(num_layers)) if named is None else named
        if len(names) != num_layers:
            raise ConfigError(
                f"{self._name}: names the types of {len(names)} layers, and num_hidden_layers is "
                f"{num_layers}: they must be equal"
            )
        for name in names:
            if name not in _KINDS:
                raise ConfigError(
                    f"{self._name}: a layer is of type {name!r}, and kvstow knows "
                    f"{', '.join(_KINDS)}: pass a model of these types"
                )
        return tuple(kind for name in names if (kind := _KINDS[name]) is not None)

    def _named_layers(self) -> Sequence[str] | None:
        """Return the type of each layer if the config lists them."""
        for field in ("layer_types", "layers_block_type"):
            given = self._fields.get(field)
            if isinstance(given, list):
                return [str(name) for name in given]
        pattern = self._text("hybrid_override_pattern")
        if pattern is None:
            return None
        return [_PATTERN_LETTERS.get(letter, letter) for letter in pattern]

    def _unnamed_layers(self, layers: range) -> Sequence[str]:
        """Return the type of each layer by the other fields."""
        is_full, other = self._full_layers(layers)
        return ["full_attention" if layer in is_full else other for layer in layers]

    def _full_layers(self, layers: range) -> tuple[Container[object], str]:
        """Return the layers with full attention, and the type of the others."""
        if self._fields.get("attn_layer_indices") is not None:  # Bamba
            return {at for at in self._list("attn_layer_indices") if isinstance(at, int)}, "mamba"
        if self._fields.get("attn_layer_period") is not None:  # Jamba
            period, first = self._count("attn_layer_period"), self._fields.get("attn_layer_offset")
            return {layer for layer in layers if layer % period == first}, "mamba"
        for field, other in (
            ("full_attention_interval", "linear_attention"),
            ("sliding_window_pattern", "sliding_attention"),
        ):
            if self._fields.get(field) is not None:
                return _every(self._count(field), layers), other
        for field, value in self._fields.items():
            if field.startswith("mamba_") and value:
                raise self._uncounted(field)
        if self._fields.get("attention_chunk_size") is not None:
            return self._layers_without_positions(layers), "chunked_attention"
        if self._has_windows:
            return self._layers_without_window(layers), "sliding_attention"
        return layers, "full_attention"

    @property
    def _has_windows(self) -> bool:
        """Whether some layers have a sliding window; a window of 0 is none in vLLM, too."""
        is_used = self._fields.get("use_sliding_window") is not False
        return is_used and bool(self._fields.get("sliding_window"))

    def _layers_without_window(self, layers: range) -> range:
        model_type = self._text("model_type") or ""
        if model_type in FULL_BELOW:
            given = self._fields.get("max_window_layers")
            end = 0 if given == 0 else self._count("max_window_layers", FULL_BELOW[model_type])
            return layers[:end]
        every = WINDOW_PERIODS.get(model_type)
        return _every(every, layers) if every else layers[:0]

    def _layers_without_positions(self, layers: range) -> Container[object]:
        """Return the layers of Llama 4 without rotary positions, which have full attention."""
        is_rotary = self._list("no_rope_layers")
        if not is_rotary:
            return _every(self._count("no_rope_layer_interval", 4), layers)
        return {layer for layer, rotary in enumerate(is_rotary) if not rotary}

    def _window(self) -> int:
        """Return the tokens of a window. K-EXAONE 2 names them layer by layer."""
        of_layers = [window for window in self._list("sliding_windows") if window]
        if of_layers[1:] != of_layers[:-1]:
            raise self._uncounted("sliding_windows")
        if of_layers:
            self._fields["sliding_window"] = of_layers[0]
        return self._count("sliding_window") + (self._text("model_type") in ONE_TOKEN_MORE)

    def _state_dtype(self) -> str | None:
        named = self._text("mamba_ssm_cache_dtype") or self._text("mamba_ssm_dtype")
        # If the config names no dtype for them, vLLM keeps the states of Nemotron-H in 32 bits, and
        # those of Alice AI, which has Kimi's delta attention (KDA).
        is_nemotron = (self._text("model_type") or "").startswith("nemotron_h")
        has_kda = "kda_allow_negative_eigenvalues" in self._fields
        return named or ("float32" if is_nemotron or has_kda else None)

    def _state(self) -> StateSize:
        """Return the state of Mamba (`mamba_*`) or of a gated delta net (`linear_*`)."""
        if "linear_num_value_heads" in self._fields:
            key_size = self._count("linear_key_head_dim")
            value_size = self._count("linear_value_head_dim")
            heads = self._count("linear_num_value_heads")
            keys = 2 * key_size * self._count("linear_num_key_heads")
            kernel = self._count("linear_conv_kernel_dim")
            channels = keys + value_size * heads
            return StateSize(channels, 0, 1, kernel - 1, heads, key_size * value_size)
        if "attn_layer_period" in self._fields:  # Jamba's layers are Mamba-1, without heads
            channels = self._count("mamba_expand") * self._count("hidden_size")
            kernel = self._count("mamba_d_conv")
            return StateSize(channels, 0, 1, kernel - 1, channels, self._count("mamba_d_state"))
        # Mamba-2. Nemotron-H has other names for the same.
        short = "mamba_n_heads" in self._fields
        heads = self._count("mamba_n_heads" if short else "mamba_num_heads")
        head_size = self._count("mamba_d_head" if short else "mamba_head_dim")
        state_size = self._count("mamba_d_state" if short else "ssm_state_size")
        num_groups = self._count("mamba_n_groups" if short else "n_groups")
        kernel = self._count("mamba_d_conv" if short else "conv_kernel")
        return StateSize(
            heads * head_size,
            2 * state_size,
            num_groups,
            kernel - 1,
            heads,
            head_size * state_size,
        )


def _every(period: int, layers: range) -> range:
    """Return the last layer of each period."""
    return layers[period - 1 :: period]
