# Shared by scripts/demo.sh and tests/test.sh: choose a Python, make a virtual environment, and
# keep pip from downloading gigabytes of torch where a small build, or one already there, will do.

say() { printf '\n==> %s\n' "$*"; }
fail() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

# Prints the first Python >= 3.10 that can make virtual environments ($PYTHON first).
find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.10 python; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' \
      2>/dev/null; then
      command -v "$candidate"
      return 0
    fi
  done
  return 1
}

require_python() {
  find_python || fail "needs Python 3.10 or newer with venv (Debian, Ubuntu: apt-get install" \
    "python3-venv), or set PYTHON to one"
}

# $CXX, when it is set, is what the build uses, whatever else there is.
require_compiler() {
  if [[ -n "${CXX:-}" ]]; then
    command -v "${CXX%% *}" >/dev/null 2>&1 || fail "CXX is $CXX, which is not a program on PATH"
    return 0
  fi
  local candidate
  for candidate in g++ c++ clang++; do
    if command -v "$candidate" >/dev/null 2>&1; then return 0; fi
  done
  fail "needs a C++ compiler (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++)"
}

# has_torch PYTHON: does it have a torch that flash-kda works with?
has_torch() {
  "$1" -c '
import importlib.metadata
major, minor = importlib.metadata.version("torch").split(".")[:2]
raise SystemExit((int(major), int(minor)) < (2, 4))' 2>/dev/null
}

# make_venv PYTHON FOLDER: makes it unless it is there and works; sees PYTHON's torch if it has one.
make_venv() {
  if "$2/bin/python" -c 'import pip' 2>/dev/null; then return 0; fi
  local flags=(--clear)
  if has_torch "$1"; then flags+=(--system-site-packages); fi
  "$1" -m venv "${flags[@]}" "$2" || fail "could not make a virtual environment in $2"
}

# choose_torch PYTHON TARGETS: sets what pip reads to decide which torch to install, if any.
# A PIP_CONSTRAINT that is already set wins; with a GPU (TARGETS not empty) pip takes the newest.
choose_torch() {
  if has_torch "$1" || [[ -n "${PIP_CONSTRAINT:-}" || -n "$2" ]]; then return 0; fi
  export PIP_CONSTRAINT="$PWD/requirements/constraints.txt"
  # PyPI's torch is a CUDA build. Where pip has no sources of its own configured, prefer torch's
  # CPU build, if its index can be reached.
  local index=https://download.pytorch.org/whl/cpu settings
  settings=$("$1" -m pip config list)
  if ! grep -Eq 'index-url|find-links|no-index' <<<"$settings" &&
    "$1" -c "import urllib.request as r; r.urlopen('$index/torch/', timeout=5)" 2>/dev/null; then
    export PIP_EXTRA_INDEX_URL="$index"
  fi
}
