"""``pytest -p two_configurations``: Triton tries two configurations of each kernel, and not all.

Which one is chosen decides how fast FLA's kernels are and not what they are for, and to compile
about a hundred of each takes minutes.
"""

from __future__ import annotations

from typing import Any

try:
    from triton.runtime.autotuner import Autotuner
except ImportError:  # without Triton there is nothing to try
    pass
else:
    _init = Autotuner.__init__

    def _with_two(self: Any, *arguments: Any, **keywords: Any) -> None:
        _init(self, *arguments, **keywords)
        self.configs = self.configs[:2]

    Autotuner.__init__ = _with_two
