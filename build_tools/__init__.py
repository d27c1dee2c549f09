"""The build: NVRTC-compiled cubins, the launcher library, the manifest, and the PEP 517 backend.

Part of the source tree and of the sdist, never installed. Needs only the standard library, plus
setuptools in ``backend`` and ``commands``; never torch.
"""
