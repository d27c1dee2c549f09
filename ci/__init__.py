"""Release steps: each module is one command, ``python -m ci.<name> --help``, run from the
repository's root by ci/build_all.sh, by cibuildwheel and by the workflows alike.

They need Python 3.10, setuptools and what requirements/wheels.txt lists; never torch. With
``FLASH_KDA_CI_DRY_RUN=1`` a command checks its arguments, says what it would do and stops.
"""
