"""The public functions: check the arguments, then launch on the GPU or compute on the CPU."""

from __future__ import annotations

import operator
import os
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.utils.deterministic
from torch import Tensor

from . import abi, cpu, library, loader, versions
from .arguments import check, check_workspace_size, not_a_flag, not_alone, scalars
from .layout import (
    HEAD_LIMIT,
    HEAD_LIMIT_TEXT,
    INDICES,
    LIMIT_TEXT,
    TOKEN_LIMIT,
    WORKSPACE,
    Layout,
    Tensors,
    integer,
    refuse,
    shown,
)

PATH_VARIABLE = "FLASH_KDA_PATH"
CHECK_VARIABLE = "FLASH_KDA_CHECK"

# torch keeps the index of a device in eight bits, and cuts larger ones.
_CUDA_INDICES = 128

# Held while a setting of the process, whether torch fills new memory, is changed.
_filling = threading.RLock()  # a call of a signal handler may interrupt its thread's own

# os.environ re-encodes names and decodes values, ten times the cost of looking in what it wraps.
_environment: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
_path_key: Any = PATH_VARIABLE
_check_key: Any = CHECK_VARIABLE
if _environment is not os.environ:
    _path_key, _check_key = map(os.environ.encodekey, (PATH_VARIABLE, CHECK_VARIABLE))


def _raw_stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


# The public call builds a Stream object; this one returns the handle. CPU builds of torch lack it.
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _raw_stream)


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    out: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float,
    initial_state: Tensor | None = None,
    final_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    workspace: Tensor | None = None,
    beta_is_logits: bool = True,
    state_indices: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_states: Tensor | None = None,
) -> None:
    r"""Forward pass of Kimi Delta Attention (arXiv 2510.26692) for head size 128.

    For every sequence and head, with a state S of shape [K, V], K = V = 128, that starts at
    ``initial_state`` (or zero), and for every token in order::

        q, k   = q / sqrt(sum(q^2) + 1e-6),  k / sqrt(sum(k^2) + 1e-6)
        log a  = lower_bound * sigmoid(exp(A_log) * (g + dt_bias))      per channel of K
        b      = sigmoid(beta)
        S      = diag(a) S
        S      = S + (b k) outer (v - k^T S)
        out    = scale * q^T S

    q, k, g and beta are given raw: the norms, the gate and the sigmoids are part of the kernels.
    Without ``cu_seqlens`` each of the B batch rows is a sequence of T tokens (N = B). With it, the
    one batch row holds N packed sequences; rows of ``out`` before the first and after the last
    are left as they are. A sequence without tokens passes its initial state (or zeros) on.

    CUDA tensors: runs on their device and its current stream, without waiting for the device, and
    may be captured in a CUDA graph. CPU tensors: computes the same function in fp32 with plain
    torch operations. Results of equal calls on one device are bitwise equal. There is no backward
    pass; that of another operation refuses tensors it saved that have been written here since.

    Args:
        q, k, v, g: bf16 [B, T, H, 128], all of one shape. The last dimension is contiguous, the
            first element 16-byte aligned and the other strides multiples of 8 elements, so that
            views of a packed projection need no copy (strides of dimensions of size 1 do not
            matter; expanded dimensions are allowed). B * T is at most 2^31 - 32, H at least 1.
        beta: bf16 or fp32 [B, T, H], logits, any strides.
        scale: factor of the output, finite; often 128 ** -0.5. A Python or numpy number, or a
            0-dimensional CPU tensor. Under torch.compile those that are no Python numbers may break
            the graph, and ``fullgraph=True`` then refuses them.
        out: bf16 [B, T, H, 128], written in place. Strides as for q; it may interleave with
            another argument in one buffer but shares no element with any.
        A_log: fp32, bf16, fp16 or fp64, H elements in any shape, or None for exp(A_log) = 1.
        dt_bias: fp32, bf16, fp16 or fp64, [H, 128] or [H * 128], or None for 0.
        lower_bound: the least log decay per token, in [-5, 0] (natural logarithm). None, which
            means a softplus gate in other implementations, is not supported yet.
        initial_state: fp32 or bf16 [N, H, V, K] (V first), inner two dimensions contiguous, or
            None for zeros.
        final_state: fp32 or bf16 [N, H, V, K], inner two dimensions contiguous, receives the
            states after the last tokens; None if they are not wanted. May be the very tensor
            given as initial_state, and otherwise shares no element with another argument. Its
            dtype is independent of initial_state's.
        cu_seqlens: int32 or int64 [N + 1], any stride, on the tensors' device: sequence n is the
            tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1 of the only batch row (B = 1). Values do
            not fall and lie in [0, T]. They are checked on the CPU; on a GPU the host reads them
            only under FLASH_KDA_CHECK.
        workspace: scratch memory for CUDA tensors: uint8, one contiguous dimension, 256-byte
            aligned, at least ``workspace_size(B * T, H, N)`` bytes. None takes it from torch's
            allocator.
        beta_is_logits: False if ``beta`` has been through its sigmoid already (in [0, 1]).
        state_indices: int32 or int64 [N], any stride, on the tensors' device. With it
            ``initial_state`` and ``final_state`` are pools [P, H, V, K] (P may differ) and sequence
            n uses slot state_indices[n] of them; -1 starts from zeros and keeps no final state.
            All other slots stay as they are. Sequences whose final state is kept need a slot of
            their own. Checked on the CPU; on a GPU any index outside a pool acts as -1.
        checkpoint_offsets: int32 or int64 [C], any stride, on the tensors' device, ascending: the
            states to keep, each as the number of tokens before it in the one row of all tokens
            (b * T + t for token t of batch row b). An offset belongs to the sequence that holds
            the token before it, and lies a multiple of 16 tokens after that sequence's start or
            at its end. Checked on the CPU; on a GPU the states of other offsets are not written.
        checkpoint_states: fp32 or bf16 [C, H, V, K], inner two dimensions contiguous: receives
            the state at each offset.

    Environment:
        FLASH_KDA_PATH: name of the kernel path to use instead of the automatic choice (an
            unknown name is an error that lists them). For CPU tensors only the name is checked.
        FLASH_KDA_CHECK: 1 makes calls on a GPU read the values of cu_seqlens, state_indices and
            checkpoint_offsets and refuse bad ones as the CPU does, naming the entry. For finding
            errors: each such call waits for the device. Where a CUDA graph is captured nothing
            can be read; the call warns that it is not checked.

    Raises:
        TypeError: an argument of a wrong Python type or dtype.
        ValueError: any other misuse of an argument. Both texts name the argument, what it got and
            what it needs; nothing has been written then.
        LoaderError: no GPU code can be loaded for the device (see its subclasses).
        LaunchError: the driver refused the launch.
    """
    execute: Callable[..., None] = run
    if torch.compiler.is_compiling():
        # Traced as one operator, so that the compiler does not follow the pointers inside.
        execute = _operator
        scale, lower_bound = scalars(scale, lower_bound, beta_is_logits)
        # Some backends give the operator a copy of what it writes, and the overlap would not show.
        inputs = (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta))
        for name, x in (*inputs, ("initial_state", initial_state), ("final_state", final_state)):
            if out is x:
                raise ValueError(not_alone("out", name))
            if checkpoint_states is not None and checkpoint_states is x:
                raise ValueError(not_alone("checkpoint_states", name))
    execute(
        q,
        k,
        v,
        g,
        beta,
        scale,
        out,
        A_log,
        dt_bias,
        lower_bound,
        initial_state,
        final_state,
        cu_seqlens,
        workspace=workspace,
        beta_is_logits=beta_is_logits,
        state_indices=state_indices,
        checkpoint_offsets=checkpoint_offsets,
        checkpoint_states=checkpoint_states,
    )


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    out: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float,
    initial_state: Tensor | None = None,
    final_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    workspace: Tensor | None = None,
    beta_is_logits: bool = True,
    state_indices: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_states: Tensor | None = None,
) -> None:
    """``fwd`` on real tensors: what an eager call and the registered operator both execute."""
    layout, pointers, scale, lower_bound, _copies = check(
        q,
        k,
        v,
        g,
        beta,
        scale,
        out,
        A_log,
        dt_bias,
        lower_bound,
        initial_state,
        final_state,
        cu_seqlens,
        state_indices,
        checkpoint_offsets,
        checkpoint_states,
        workspace,
    )
    if beta_is_logits is not True and beta_is_logits is not False:
        raise not_a_flag(beta_is_logits)
    on_cuda = layout.on_cuda
    if not on_cuda or _environment.get(_check_key):
        tensors = (
            *(q, k, v, g, beta, out, A_log, dt_bias, initial_state, final_state, cu_seqlens),
            *(state_indices, checkpoint_offsets, checkpoint_states, workspace),
        )
        if not on_cuda:
            _check_on_cpu(layout, workspace)
            # A compiled graph cannot enter or leave inference mode.
            with torch.no_grad() if torch.compiler.is_compiling() else torch.inference_mode():
                cpu.forward(layout, tensors, scale, lower_bound, beta_is_logits)
            return
        _check_on_host(layout, tensors)
    _forward_cuda(layout, pointers, scale, lower_bound, workspace, beta_is_logits)
    written: tuple[Tensor, ...] = (out,) if final_state is None else (out, final_state)
    if checkpoint_states is not None:
        written += (checkpoint_states,)
    if workspace is not None:
        written += (workspace,)
    versions.wrote(written)


_operator = library.register(run)


def workspace_size(
    t_total: int, heads: int, sequences: int, device: torch.device | str | int | None = None
) -> int:
    """Bytes of workspace that ``fwd`` needs on a GPU.

    The size covers every split of ``t_total`` tokens into ``sequences`` sequences, so it does not
    depend on the values of ``cu_seqlens``; a call without them may need less. It does depend on the
    GPU, and on ``FLASH_KDA_PATH`` if that is set. On compute capability 9.0 a call of smaller sizes
    may need more.

    Args:
        t_total: B * T, tokens of all batch rows together, at most 2^31 - 32.
        heads: H, at least 1.
        sequences: N; B without cu_seqlens, else its length minus one.
        device: the CUDA device of the tensors; None means the current one. Without any GPU the
            answer is a size that suffices on every GPU.

    Raises:
        TypeError: not an integer.
        ValueError: out of range, or not a CUDA device.
        BrokenInstallError: the launcher library is missing or damaged.
        LoaderError: the device cannot run any kernel of this package.
    """
    sizes = check_sizes("workspace_size", t_total, heads, sequences)
    if device is None and not torch.cuda.is_available():
        return abi.workspace_size(*sizes)
    where = _cuda_device(device)
    if where == torch.device("cuda"):
        # Without a GPU the loader says so better than torch would.
        index = torch.cuda.current_device() if torch.cuda.is_available() else 0
        where = torch.device("cuda", index)
    launcher = abi.launcher()
    gpu = loader.module_for(where).gpu
    return launcher.plan(*sizes, gpu, _forced_path(launcher)).workspace_bytes


def check_sizes(function: str, t_total: int, heads: int, sequences: int) -> tuple[int, int, int]:
    """The sizes that ``flash_kda.<function>`` was given, as ints within their ranges."""
    sizes = []
    for name, value, least, most, at_most in (
        ("t_total", t_total, 0, TOKEN_LIMIT, LIMIT_TEXT),
        ("heads", heads, 1, HEAD_LIMIT, HEAD_LIMIT_TEXT),
        ("sequences", sequences, 0, TOKEN_LIMIT, LIMIT_TEXT),
    ):
        size = integer(function, name, value)
        if not least <= size <= most:
            raise ValueError(
                f"flash_kda.{function}: {name}: got {shown(value)}; needs at least {least} and "
                f"{at_most}"
            )
        sizes.append(size)
    return sizes[0], sizes[1], sizes[2]


def _cuda_device(device: torch.device | str | int | None) -> torch.device:
    """The device that workspace_size was given. Torch takes cuda:256 for cuda:0."""
    needs = "a CUDA device: a torch.device, 'cuda', 'cuda:<index>' or an index from 0 to 127"
    refused = f"flash_kda.workspace_size: device: got {shown(device)}; needs {needs}"
    if device is None:
        return torch.device("cuda")
    if isinstance(device, torch.device):
        where = device
    elif isinstance(device, str):
        try:
            where = torch.device(device)
        except RuntimeError:
            raise ValueError(refused) from None
        if str(where) != device:
            raise ValueError(refused)
    else:
        try:
            if isinstance(device, bool):
                raise TypeError
            index = operator.index(device)
        except TypeError:
            raise TypeError(f"{refused}, not {type(device).__name__}") from None
        if not 0 <= index < _CUDA_INDICES:
            raise ValueError(refused)
        where = torch.device("cuda", index)
    if where.type != "cuda" or (where.index is not None and where.index < 0):
        raise ValueError(refused)
    return where


def _forward_cuda(
    layout: Layout,
    pointers: tuple[int, ...],
    scale: float,
    lower_bound: float,
    workspace: Tensor | None,
    beta_is_logits: bool,
) -> None:
    if layout.writes_nothing:
        return
    module = loader.module_for(layout.device)
    launcher = abi.launcher()
    path = _forced_path(launcher)
    key, needed = layout.workspace
    if key != path:
        sizes = (layout.t_total, layout.heads, layout.sequences)
        needed = launcher.plan(*sizes, module.gpu, path, layout.varlen).workspace_bytes
        layout.workspace = (path, needed)
    if needed:
        if workspace is None:
            # Freed to this stream's pool on return: later work on it runs after the kernels.
            workspace = _scratch(needed, layout.device)
            pointers = (*pointers[:WORKSPACE], _address_of(workspace))
        else:
            check_workspace_size(workspace, needed, layout)
            needed = workspace.numel()
    launcher.forward(
        module.handle,
        pointers,
        _current_stream(layout.index),
        needed,
        layout.geometry,
        scale,
        lower_bound,
        layout.dtypes,
        beta_is_logits,
        path,
    )


def _scratch(size: int, device: torch.device) -> Tensor:
    """Uninitialised memory, even where deterministic mode would fill it: it is never read first."""
    if not torch.are_deterministic_algorithms_enabled():
        return torch.empty(size, dtype=torch.uint8, device=device)
    settings: Any = torch.utils.deterministic
    with _filling:
        fills = settings.fill_uninitialized_memory
        settings.fill_uninitialized_memory = False
        try:
            return torch.empty(size, dtype=torch.uint8, device=device)
        finally:
            settings.fill_uninitialized_memory = fills


def _address_of(workspace: Tensor) -> int:
    # A FakeTensor has no memory, whatever it answers.
    address = workspace.data_ptr() if type(workspace) is Tensor else 0
    if not address:
        raise ValueError(
            refuse(
                "workspace",
                f"None, and torch.empty gives a {type(workspace).__name__} without memory here",
                "a call outside of FakeTensorMode and other tracing, or a workspace with memory",
            )
        )
    return address


def _forced_path(launcher: abi.Launcher) -> int:
    raw = _environment.get(_path_key)
    return launcher.path_id(os.fsdecode(raw)) if raw else abi.AUTOMATIC_PATH


def _check_on_host(layout: Layout, tensors: Tensors) -> None:
    """Read a GPU call's indices and offsets and refuse what the CPU path would refuse."""
    if not _checking():
        return
    indices = {at: x for at in INDICES if (x := tensors[at]) is not None}
    if not indices:
        return
    if _capturing(layout.device):
        warnings.warn(
            f"flash_kda.fwd: {CHECK_VARIABLE}: a call that a CUDA graph captures is not checked",
            stacklevel=4,
        )
        return
    here = [indices[at].cpu() if at in indices else x for at, x in enumerate(tensors)]
    cpu.check_values(layout, tuple(here))


def values_are_checked(device: torch.device) -> bool:
    """Whether ``fwd`` refuses bad values of cu_seqlens and its like on this device."""
    return device.type == "cpu" or _checking()


def values_can_be_read(device: torch.device) -> bool:
    """Whether they are checked, and a caller may read them, too."""
    if torch.compiler.is_compiling() or not values_are_checked(device):
        return False
    return device.type == "cpu" or not _capturing(device)


def _checking() -> bool:
    raw: Any = _environment.get(_check_key)
    return bool(raw) and os.fsdecode(raw) != "0"


def _capturing(device: torch.device) -> bool:
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _check_on_cpu(layout: Layout, workspace: Tensor | None) -> None:
    """Refuse what a GPU call would refuse, as far as this installation can tell.

    The workspace's size and the names of paths are the launcher's to know. The CPU path needs
    neither, and works without the launcher; then they go unchecked. So does the size where there is
    a GPU: the ``workspace_size`` of that one may be less than the one that suffices everywhere.
    """
    if workspace is None and not _environment.get(_path_key):
        return
    launcher = abi.launcher_or_none()
    if launcher is None:
        return
    _forced_path(launcher)
    if workspace is not None and not torch.cuda.is_available():
        needed = launcher.workspace_size(layout.t_total, layout.heads, layout.sequences)
        check_workspace_size(workspace, needed, layout)
