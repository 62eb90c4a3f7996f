#!/usr/bin/env bash
# The same set-up as quickstart.sh, then the checks and the tests. Arguments go to pytest.
set -euo pipefail
source "$(dirname "$0")/setup.sh"
ruff check .
ruff format --check .
mypy
exec python -m pytest "$@"
