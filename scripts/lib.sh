# shellcheck shell=bash
# Shared by the scripts of ci/, scripts/ and tests/, which source it in the checkout's root: choose a
# Python, make a virtual environment, install compilers, and keep pip from downloading gigabytes of
# torch where a small build, or one already there, will do.

say() { printf '\n==> %s\n' "$*"; }
fail() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

# require_writable PATH...: those that exist must be writable; the checkout itself is always one.
require_writable() {
  local path
  for path in . "$@"; do
    if [[ -e "$path" && ! -w "$path" ]]; then
      fail "cannot write to $(realpath "$path"): use a checkout of your own on a writable disk"
    fi
  done
}

# usable_python PROGRAM: is it a Python >= 3.10 that can make virtual environments?
usable_python() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}

# Prints the Python to use. $PYTHON, when it is set, is used whatever else there is.
require_python() {
  local needed="Python 3.10 or newer with venv" candidate
  local -r debian="(Debian, Ubuntu: apt-get install python3-venv)"
  if [[ -n "${PYTHON:-}" ]]; then
    command -v "$PYTHON" >/dev/null 2>&1 || fail "PYTHON is $PYTHON, which is not a program"
    usable_python "$PYTHON" || fail "PYTHON is $PYTHON, which is not $needed $debian"
    command -v "$PYTHON"
    return 0
  fi
  for candidate in python3 python3.13 python3.12 python3.11 python3.10 python; do
    if usable_python "$candidate"; then
      command -v "$candidate"
      return 0
    fi
  done
  fail "needs $needed $debian, or set PYTHON to one"
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
  local state="already there, used as it is"
  if ! "$2/bin/python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    local flags=(--clear)
    if has_torch "$1"; then flags+=(--system-site-packages); fi
    "$1" -m venv "${flags[@]}" "$2" || fail "could not make a virtual environment in $2"
    state="new"
  fi
  say "Virtual environment $2: $("$2/bin/python" --version), $state"
}

# choose_torch PYTHON TARGETS: sets what pip reads to decide which torch to install, if any.
# A PIP_CONSTRAINT that is already set wins; with a GPU (TARGETS not empty) pip takes the newest.
choose_torch() {
  if has_torch "$1" || [[ -n "${PIP_CONSTRAINT:-}" || -n "$2" ]]; then return 0; fi
  # Relative: pip takes a blank in this variable for the gap between two files.
  export PIP_CONSTRAINT=requirements/constraints.txt
  # PyPI's torch is a CUDA build. Where pip has no sources of its own configured, prefer torch's
  # CPU build, if its index can be reached.
  local index=https://download.pytorch.org/whl/cpu settings
  settings=$("$1" -m pip config list)
  if ! grep -Eq 'index-url|find-links|no-index' <<<"$settings" &&
    "$1" -c "import urllib.request as r; r.urlopen('$index/torch/', timeout=5)" 2>/dev/null; then
    export PIP_EXTRA_INDEX_URL="$index"
  fi
}

# install_compilers PYTHON FOLDER: NVRTC, CUDA headers and CUTLASS's, each in a folder of its own
# (torch may depend on other releases of the same packages), again only when their versions change.
install_compilers() {
  local wanted cuda requirements flags
  wanted=$(cat build_tools/toolkit.py build_tools/cutlass.py | sha256sum)
  if [[ "$(cat "$2/wanted" 2>/dev/null)" == "$wanted" ]]; then return 0; fi
  rm -rf "$2"
  for cuda in 12.9 13.0 cutlass; do
    mapfile -t requirements < <("$1" -c "
from build_tools import cutlass, toolkit
print(*toolkit.REQUIREMENTS.get('$cuda', [cutlass.REQUIREMENT]), sep='\n')")
    flags=(--quiet --disable-pip-version-check --target "$2/$cuda")
    # nvidia-cutlass depends on much that its headers do not need.
    if [[ $cuda == cutlass ]]; then flags+=(--no-deps); fi
    "$1" -m pip install "${flags[@]}" "${requirements[@]}" ||
      fail "could not install ${requirements[*]}: pip's message is above"
  done
  echo "$wanted" >"$2/wanted"
}

# compilers_path FOLDER: what PYTHONPATH has to hold for them.
compilers_path() { printf '%s' "$1/12.9:$1/13.0:$1/cutlass"; }
