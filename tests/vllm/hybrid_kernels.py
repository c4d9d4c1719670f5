"""What vLLM's CPU engine lacks to run recurrent models in float32, written in plain torch.

- Mamba 2: the states inside a chunk of a prefill. vLLM keeps the state of a block's end from there,
  and its CPU kernel returns only the last state.
- Mamba 1: vLLM has no CPU kernel.
- Gated delta nets: vLLM's CPU kernels take bfloat16 only, whose noise would hide lost blocks.
- Short convolutions need nothing. With vLLM's own rotary kernel, LFM2's answers depend on the
  batch.
"""

from __future__ import annotations

from typing import Any

import pytest
import tests.vllm.runner  # noqa: F401 - before anything imports vLLM
import torch
import torch.nn.functional as F
from vllm import _custom_ops
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba import mamba_mixer, mamba_mixer2
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops import ssd_combined
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention, mamba_ssm
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

_scan = mamba_ssm._mamba_chunk_scan_combined_fwd_cpu
_multiply = _custom_ops.onednn_mm


def install(kind: str, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Install what a model of this type needs; return the engine settings that it needs."""
    if kind in ("granitemoehybrid", "falcon_h1", "nemotron_h", "mamba2"):
        patch.setattr(mamba_ssm, "_mamba_chunk_scan_combined_fwd_cpu", _scan_chunks)
        patch.setattr(ssd_combined, "_mamba_chunk_scan_combined_fwd", _scan_chunks)
        patch.setattr(mamba_mixer2, "store_prefill_checkpoint", _store_checkpoint)
    elif kind == "jamba":
        patch.setattr(mamba_mixer, "selective_scan_fn", _selective_scan)
        patch.setattr(mamba_mixer, "selective_state_update", _selective_update)
        # The layer passes transposed views.
        patch.setattr(
            _custom_ops,
            "onednn_mm",
            lambda handler, x, bias: _multiply(handler, x.contiguous(), bias),
        )
    elif kind == "qwen3_next":
        patch.setattr(gdn_attention, "cpu_gdn_attention_core", _gated_delta_net)
    elif kind == "lfm2":
        return {"compilation_config": {"custom_ops": ["none"]}}
    return {}


# -- Mamba 2 ------------------------------------------------------------------------------------


def _scan_chunks(
    x: Any, dt: Any, a: Any, b: Any, c: Any, chunk_size: int, out: Any, **more: Any
) -> torch.Tensor:
    """Do as vLLM's function, and return the state after each chunk if it is asked for them."""
    if not more.pop("return_intermediate_states", False):
        return _scan(x, dt, a, b, c, chunk_size, out, **more)
    ends, sequences = more.pop("cu_chunk_seqlens").tolist(), more.pop("seq_idx").tolist()
    initial = more.pop("initial_states", None)
    del more["cu_seqlens"], more["last_chunk_indices"]
    states: list[torch.Tensor] = []
    for chunk, sequence in enumerate(sequences):
        part = slice(ends[chunk], ends[chunk + 1])
        if chunk and sequences[chunk - 1] == sequence:
            state = states[-1]
        else:
            state = None if initial is None else initial[sequence : sequence + 1]
        bounds = torch.tensor([0, part.stop - part.start])
        more |= {"initial_states": state, "cu_seqlens": bounds}
        states.append(_scan(x[part], dt[part], a, b[part], c[part], chunk_size, out[part], **more))
    return torch.cat(states)


def _store_checkpoint(
    checkpoint: Any,
    chunk_idx: torch.Tensor,
    x: torch.Tensor,
    conv_state: torch.Tensor,
    chunk_states: torch.Tensor,
    ssm_state: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    state_len: int,
) -> None:
    """Write the state at each checkpoint into its block."""
    for row, offset in enumerate(checkpoint.checkpoint_offsets.tolist()):
        if offset:
            block, end = checkpoint.state_indices[row], int(query_start_loc[row]) + offset
            conv_state[block, :, :state_len] = x[:, end - state_len : end]
            ssm_state[block] = chunk_states[chunk_idx[row]]


# -- Mamba 1 ------------------------------------------------------------------------------------


def _selective_scan(
    u: torch.Tensor,
    states: torch.Tensor,
    delta: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    z: torch.Tensor,
    bias: torch.Tensor,
    *,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor | None,
    **_: Any,
) -> torch.Tensor:
    """Compute prompts: columns are tokens."""
    starts, out = query_start_loc.tolist(), torch.empty_like(u)
    b, c = (each.reshape(-1, each.shape[-1]) for each in (b, c))
    dt = F.softplus(delta + bias[:, None])
    for row, slot in enumerate(cache_indices.tolist()):
        known = has_initial_state is not None and has_initial_state[row]
        state = states[slot].clone() if known else torch.zeros_like(states[slot])
        for at in range(starts[row], starts[row + 1]):
            now = dt[:, at, None]
            state = state * torch.exp(now * a) + now * u[:, at, None] * b[:, at]
            out[:, at] = state @ c[:, at] + d * u[:, at]
        states[slot] = state
    return out * F.silu(z)


def _selective_update(
    states: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    bias: torch.Tensor,
    *,
    z: torch.Tensor,
    state_batch_indices: torch.Tensor,
    out: torch.Tensor,
    **_: Any,
) -> None:
    """Compute one token of each request: rows are requests."""
    slots = state_batch_indices.flatten()[: len(x)]
    now = F.softplus(dt + bias)[..., None]
    new = states[slots] * torch.exp(now * a) + now * x[..., None] * b[:, None]
    states[slots] = new
    out[:] = ((new @ c[..., None])[..., 0] + d * x) * F.silu(z)


# -- gated delta nets ---------------------------------------------------------------------------


def _gated_delta_net(
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    core_attn_out: torch.Tensor,
    layer_name: LayerNameType,
) -> None:
    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:
        return
    meta = context.attn_metadata[layer.prefix]
    conv, states = layer.kv_cache
    conv = conv if is_conv_state_dim_first() else conv.transpose(1, 2)
    weight = gdn_attention._unpacked_conv_weight(layer).float()
    starts = meta.non_spec_query_start_loc.tolist()
    slots = meta.non_spec_state_indices_tensor.tolist()
    has_state = [True] * meta.num_decodes
    if meta.num_prefills:
        has_state += meta.has_initial_state[-meta.num_prefills :].tolist()
    for row, known in enumerate(has_state):
        part, slot = slice(starts[row], starts[row + 1]), slots[row]
        if part.start == part.stop:
            continue
        if not known:
            conv[slot], states[slot] = 0, 0
        x = torch.cat([conv[slot], mixed_qkv[part].t()], dim=1)
        conv[slot] = x[:, 1 - weight.shape[1] :]
        qkv = F.silu(F.conv1d(x[None], weight[:, None], groups=len(x))[0]).t()
        gate = -layer.A_log.exp() * F.softplus(a[part] + layer.dt_bias)
        q, k, v = layer.rearrange_mixed_qkv(qkv)
        beta = torch.sigmoid(b[part])
        core_attn_out[part], states[slot] = _delta_rule(q, k, v, gate, beta, states[slot])


def _delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of all tokens and the state after them (heads, value, key).

    In double precision, so that the outputs hardly depend on how a prompt is cut into chunks. All
    corrections `u` of a chunk follow from one triangular system, because each depends on those of
    earlier tokens only.
    """
    heads = v.shape[-2]
    q, k = (F.normalize(each.double(), dim=-1, eps=1e-6).squeeze(0) for each in (q, k))
    q = q * q.shape[-1] ** -0.5
    q, k = (each.repeat_interleave(heads // each.shape[1], dim=1).movedim(1, 0) for each in (q, k))
    v, beta = v.double().squeeze(0).movedim(1, 0), beta.double().t()[..., None]
    total = gate.double().cumsum(0).t()
    before = state.double().movedim(1, 2)  # (heads, key, value)
    decay = (total[:, :, None] - total[:, None, :]).tril().exp().tril()
    since = total.exp()[..., None]
    system = torch.eye(k.shape[1]).double() + beta * ((k @ k.mT) * decay).tril(-1)
    u = torch.linalg.solve_triangular(system, beta * (v - since * (k @ before)), upper=False)
    out = since * (q @ before) + ((q @ k.mT) * decay) @ u
    after = since[:, -1:] * before + (k * decay[:, -1, :, None]).mT @ u
    return out.movedim(0, 1).float(), after.mT.float()
