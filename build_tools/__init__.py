"""The build: NVRTC-compiled cubins, the launcher library, the manifest, and the PEP 517 backend.

Part of the source tree and of the sdist, never installed. Needs only the standard library, plus
setuptools in ``backend`` and ``commands``; never torch.
"""

import sys

# Before any other module of this package, which an older Python could not even import.
if sys.version_info < (3, 10):  # noqa: UP036
    _found = ".".join(map(str, sys.version_info[:2]))
    sys.exit("flash-kda: needs Python 3.10 or newer, this is Python " + _found)
