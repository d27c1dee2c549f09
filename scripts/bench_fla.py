"""FLA's Triton ``chunk_kda`` as the benchmark calls it, or the reason why it cannot be called."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch


def _fp32(state: torch.Tensor | None) -> torch.Tensor | None:
    return None if state is None else state.float()


def fla_version() -> str | None:
    """Version of the importable FLA, or None."""
    if importlib.util.find_spec("fla") is None:
        return None
    try:
        return importlib.metadata.version("flash-linear-attention")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"  # importable, but not through an installed distribution


class FLA:
    """Holds ``chunk_kda`` after a successful import; ``error`` says why there is none."""

    def __init__(self) -> None:
        # Its dispatcher would otherwise hand the call to the package being measured.
        os.environ["FLA_FLASH_KDA"] = "0"
        self.version = fla_version()
        self.error: str | None = None
        self._chunk_kda: Callable[..., Any] | None = None
        self._v_first = "state_v_first"
        if self.version is None:
            self.error = "not installed"
            return
        try:
            from fla.ops.kda import chunk_kda

            parameters = inspect.signature(chunk_kda).parameters
        except Exception as error:  # any failure inside a foreign package means "not measured"
            self.error = f"{type(error).__name__}: {error}"
            return
        if "state_v_first" not in parameters:
            self._v_first = "transpose_state_layout"
        self._chunk_kda = chunk_kda

    @property
    def available(self) -> bool:
        return self._chunk_kda is not None

    def bind(self, inputs: dict[str, Any]) -> Callable[[], torch.Tensor]:
        """A call of the same function on the same inputs; it returns out [1, T, H, 128]."""
        call = self.bind_both(inputs)
        return lambda: call()[0]

    def bind_both(self, inputs: dict[str, Any]) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        """A call of the same function on the same inputs; it returns out and the final state.

        FLA takes fp32 states only, so the states are handed over in fp32 whatever ours are.
        """
        assert self._chunk_kda is not None
        chunk_kda = self._chunk_kda
        arguments = {name: inputs[name] for name in ("q", "k", "v", "g", "beta", "scale")}
        arguments |= {
            "initial_state": _fp32(inputs["initial_state"]),
            "output_final_state": True,
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "safe_gate": True,
            "lower_bound": inputs["lower_bound"],
            "A_log": inputs["A_log"],
            "dt_bias": inputs["dt_bias"].reshape(-1),
            "cu_seqlens": inputs["cu_seqlens"],
            self._v_first: True,
        }

        def call() -> tuple[torch.Tensor, torch.Tensor]:
            return chunk_kda(**arguments)

        return call
