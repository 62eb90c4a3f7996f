# Sourced by the other scripts: a virtual environment in .venv with dsx in it, made once.
# After it, `dsx`, `deepspeed` and `python` are those of .venv and the working folder is the clone's.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3; do
    if [ -n "$candidate" ] && command -v "$candidate" >/dev/null &&
      "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "dsx needs Python 3.11 or newer, and none was found; install one, or name it: PYTHON=..." >&2
  return 1
}

# What was installed is remembered, so that a second call in the same clone installs nothing.
wanted=$(cat pyproject.toml launch/constraints.txt | cksum)
if [ -x .venv/bin/dsx ] && [ "$(cat .venv/installed 2>/dev/null)" = "$wanted" ]; then
  echo "reusing the environment in .venv"
else
  echo "installing into .venv (some minutes, once)"
  python=$(find_python)
  "$python" -m venv .venv
  .venv/bin/python -m pip install --quiet "$(grep '^torch==' launch/constraints.txt)"
  .venv/bin/python -m pip install --quiet --constraint launch/constraints.txt --editable '.[dev]'
  echo "$wanted" >.venv/installed
fi
export PATH="$PWD/.venv/bin:$PATH"

# One thread a process: the ranks of both clusters share the cores of this machine.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if ! python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
  export DS_ACCELERATOR=cpu
fi
