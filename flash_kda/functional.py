"""``chunk_kda``: the operation under the argument names of flash-linear-attention (FLA).

What the kernels compute is one choice among FLA's options. Every other choice is refused with its
reason: nothing is approximated, and no option is ignored that would change the result.
"""

from __future__ import annotations

import warnings
from typing import Any, NoReturn

import torch
from torch import Tensor

from .layout import BF16, CU_SEQLENS, HEAD_DIM, INTEGERS, V, check_dtype, integer, shown
from .ops import fwd

_FLAGS = (
    "output_final_state",
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
    "safe_gate",
    "disable_recompute",
    "return_intermediate_states",
    "state_v_first",
    "use_graph",
)


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    transpose_state_layout: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    r"""Kimi Delta Attention with the argument names and defaults of ``fla.ops.kda.chunk_kda``.

    The names, their order and their defaults are FLA's, so that calls can be moved here. The
    defaults describe a call that the kernels do not serve: set at least
    ``use_qk_l2norm_in_kernel=True``, ``use_gate_in_kernel=True`` and ``lower_bound``, and
    ``state_v_first=True`` if states go in or out. It can be compiled by torch.compile with
    ``fullgraph=True``; there is no backward pass.

    Args:
        q, k, v, g: bf16 [B, T, H, 128], raw, strides as for ``flash_kda.fwd``.
        beta: bf16 or fp32 [B, T, H]: logits with ``use_beta_sigmoid_in_kernel=True``, else the
            step sizes themselves, between 0 and 1.
        scale: factor of the output; None means 128 ** -0.5.
        initial_state: fp32 or bf16 [N, H, V, K], or None for zeros. N is B, or the number of
            packed sequences.
        output_final_state: return the states after the last tokens, else None in their place.
        use_qk_l2norm_in_kernel: must be True.
        use_gate_in_kernel: must be True.
        use_beta_sigmoid_in_kernel: whether beta holds logits.
        allow_neg_eigval: must be False.
        safe_gate: either; FLA chooses between two ways to compute the same function by it.
        lower_bound: the least log decay per token, in [-5, 0]; must be given.
        disable_recompute: no effect: it concerns FLA's backward pass.
        return_intermediate_states: must be False; ``flash_kda.fwd`` has ``checkpoint_states``.
        state_v_first: must be True if there is an initial or a final state.
        cu_seqlens: int32 or int64 [N + 1] on the tensors' device, or None; B is then 1.
        cu_seqlens_cpu: no effect: the values are never needed on the host.
        cp_context: must be None.
        use_graph: no effect: every call may be captured in a CUDA graph.
        max_num_seqs: the number of sequences, or None; compared, as FLA does, with ``use_graph``.
        A_log: H elements of any float dtype in any shape, or None for exp(A_log) = 1.
        dt_bias: [H, 128] or [H * 128] of any float dtype, or None for 0.
        transpose_state_layout: the older name of ``state_v_first``; deprecated, of which compiled
            calls do not warn.

    Returns:
        ``(out, final_state)``: bf16 [B, T, H, 128], and fp32 [N, H, V, K] or None. Rows of ``out``
        that ``cu_seqlens`` does not cover hold anything.

    Raises:
        TypeError: an argument of a wrong Python type or dtype, such as a flag that is no bool.
        ValueError: a choice that the kernels do not offer, with the reason, or any other misuse.
        FlashKDAError: as ``flash_kda.fwd`` does, which also checks what is handed on to it.
    """
    flags = (
        output_final_state,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        safe_gate,
        disable_recompute,
        return_intermediate_states,
        state_v_first,
        use_graph,
    )
    for flag in flags:
        if flag is not True and flag is not False:
            _refuse_flags(flags)
    if transpose_state_layout is not None:
        if transpose_state_layout is not True and transpose_state_layout is not False:
            raise TypeError(
                _refuse(
                    "transpose_state_layout",
                    shown(transpose_state_layout),
                    "True, False or None",
                )
            )
        if state_v_first:
            raise ValueError(
                _refuse(
                    "transpose_state_layout",
                    f"{transpose_state_layout} with state_v_first, its newer name",
                    "one of them",
                )
            )
        if not torch.compiler.is_compiling():  # which cannot warn
            warnings.warn(
                "transpose_state_layout is the older name of state_v_first", DeprecationWarning, 2
            )
        state_v_first = transpose_state_layout
    if not use_qk_l2norm_in_kernel:
        raise ValueError(
            _refuse("use_qk_l2norm_in_kernel", False, "True: the kernels normalise q and k always")
        )
    if not use_gate_in_kernel:
        raise ValueError(
            _refuse(
                "use_gate_in_kernel",
                False,
                "True: the kernels take g before its activation and have no input for decays",
            )
        )
    if allow_neg_eigval:
        raise ValueError(
            _refuse("allow_neg_eigval", True, "False: the kernels' step sizes lie in [0, 1]")
        )
    if lower_bound is None:
        raise ValueError(
            _refuse(
                "lower_bound",
                None,
                "a float in [-5, 0]: the kernels have the bounded gate only, not the softplus "
                "gate that None selects",
            )
        )
    if return_intermediate_states:
        raise ValueError(
            _refuse(
                "return_intermediate_states",
                True,
                "False: the kernels do not keep the state of every chunk; flash_kda.fwd writes "
                "those that its checkpoint_offsets name",
            )
        )
    if cp_context is not None:
        raise ValueError(
            _refuse(
                "cp_context",
                type(cp_context).__name__,
                "None: the kernels do not split a sequence over several GPUs",
            )
        )
    if not state_v_first and (initial_state is not None or output_final_state):
        raise ValueError(
            _refuse(
                "state_v_first",
                False,
                "True when there is an initial or a final state: the kernels keep states as "
                "[N, H, V, K]; convert one of [N, H, K, V] with .mT.contiguous()",
            )
        )
    if not isinstance(q, Tensor) or q.is_nested or q.dim() != 4:
        _refuse_dimensions("q", q, "a torch.Tensor", "4 dimensions, [B, T, H, 128]")
    if not isinstance(v, Tensor) or v.is_nested or v.dim() != 4:
        _refuse_dimensions("v", v, "a torch.Tensor", "4 dimensions, [B, T, H, 128]")
    sequences, _, heads, _ = v.shape
    if q.shape[2] != heads:
        raise ValueError(
            _refuse(
                "v",
                f"{heads} heads while q has {q.shape[2]}",
                "as many: the kernels have no grouped value heads; repeat q and k",
            )
        )
    if cu_seqlens is not None:
        if not isinstance(cu_seqlens, Tensor) or cu_seqlens.is_nested or cu_seqlens.dim() != 1:
            needs = "one dimension, [N + 1]"
            _refuse_dimensions("cu_seqlens", cu_seqlens, "a torch.Tensor or None", needs)
        sequences = cu_seqlens.shape[0] - 1
        # Not of a number that the compiler does not know.
        if not torch.compiler.is_compiling() and sequences < 0:
            raise ValueError(_refuse("cu_seqlens", "no entries", "N + 1 entries: at least 1"))
    if max_num_seqs is not None:
        most = integer("chunk_kda", "max_num_seqs", max_num_seqs)
        if use_graph and most != sequences:
            raise ValueError(
                _refuse(
                    "max_num_seqs",
                    most,
                    f"{sequences}, the number of sequences: pad cu_seqlens with empty ones",
                )
            )

    # Before memory is asked for by sizes that may be wrong with them; ``fwd`` checks all else.
    check_dtype(V, v, BF16)
    check_dtype(CU_SEQLENS, cu_seqlens, INTEGERS)
    out = torch.empty(v.shape, dtype=torch.bfloat16, device=v.device)
    final_state = None
    if output_final_state:
        shape = (sequences, heads, HEAD_DIM, HEAD_DIM)
        final_state = torch.empty(shape, dtype=torch.float32, device=v.device)
    fwd(
        q,
        k,
        v,
        g,
        beta,
        HEAD_DIM**-0.5 if scale is None else scale,
        out,
        A_log,
        dt_bias,
        lower_bound,
        initial_state,
        final_state,
        cu_seqlens,
        beta_is_logits=use_beta_sigmoid_in_kernel,
    )
    return out, final_state


def _refuse_flags(flags: tuple[object, ...]) -> NoReturn:
    wrong = (x for x in zip(_FLAGS, flags, strict=True) if x[1] is not True and x[1] is not False)
    name, flag = next(wrong)
    raise TypeError(_refuse(name, shown(flag), "True or False"))


def _refuse_dimensions(name: str, value: object, kind: str, form: str) -> NoReturn:
    """A size is asked of it here; ``fwd`` checks all else."""
    if not isinstance(value, Tensor):
        raise TypeError(_refuse(name, f"a value of type {type(value).__name__}", kind))
    if value.is_nested:
        raise ValueError(_refuse(name, "a nested tensor", "an ordinary strided tensor"))
    raise ValueError(_refuse(name, f"shape {list(value.shape)}", form))


def _refuse(name: str, got: object, needs: str) -> str:
    return f"flash_kda.chunk_kda: {name}: got {got}; needs {needs}"
