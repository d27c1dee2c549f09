#!/usr/bin/env bash
# Installs what the commands of ci/ need into the Python that is active.
#
#   bash ci/setup.sh                   auditwheel, ziglang, ...
#   bash ci/setup.sh --toolkit 12.9    NVRTC and the CUDA headers of that release, and CUTLASS, too
#   bash ci/setup.sh --workflows       cibuildwheel, and zizmor and actionlint, too
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ "${1:-}" == --help ]]; then
  sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
  exit 0
fi
python=${PYTHON:-python3}
wanted=(-r requirements/wheels.txt)
while (($#)); do
  case $1 in
    --toolkit)
      mapfile -t compiler < <("$python" -c "
from build_tools import cutlass, toolkit
print(*toolkit.REQUIREMENTS['${2:?--toolkit needs a release}'], cutlass.REQUIREMENT, sep='\n')")
      ((${#compiler[@]})) || exit 1
      wanted+=("${compiler[@]}")
      shift
      ;;
    --workflows) wanted+=(-r requirements/workflows.txt) ;;
    *)
      echo "setup.sh: unknown argument $1, see --help" >&2
      exit 2
      ;;
  esac
  shift
done
if [[ "${FLASH_KDA_CI_DRY_RUN:-}" == 1 ]]; then
  echo "dry run: $python -m pip install ${wanted[*]}"
  exit 0
fi
exec "$python" -m pip install --quiet --disable-pip-version-check "${wanted[@]}"
