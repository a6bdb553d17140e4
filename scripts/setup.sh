#!/usr/bin/env bash
# Makes .venv with this project installed in it, editable:  bash scripts/setup.sh [EXTRA...]
# Does nothing when pyproject.toml, the Python version and the extras asked for are those of the last time.
#   DDTREE_PYTHON   the Python to use, instead of the first that is new enough
#   DDTREE_EXTRAS   more extras, e.g. "cuda13"
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

minimum="3.11" # as requires-python in pyproject.toml says
candidates=(python3 python3.14 python3.13 python3.12 python3.11)
[ -z "${DDTREE_PYTHON:-}" ] || candidates=("$DDTREE_PYTHON")
stamp=".venv/.ddtree-setup"

say() { echo "setup: $*" >&2; }

# Prints the version of the Python $1. Fails with 3 when it is too old, with 4 when it cannot make environments; a
# version manager's shim that names nothing installed fails with a code of its own.
probe() {
    "$1" - "$minimum" 2>/dev/null <<'PY'
import sys
print(".".join(map(str, sys.version_info[:3])))
if sys.version_info < tuple(map(int, sys.argv[1].split("."))):
    sys.exit(3)
try:
    import ensurepip, venv
except ImportError:
    sys.exit(4)
PY
}

# Sets `python` to the first candidate that runs, is new enough and can make environments. If there is none, `seen` says
# what was tried.
find_python() {
    local name path version code
    seen=""
    for name in "${candidates[@]}"; do
        while IFS= read -r path; do
            code=0
            version="$(probe "$path")" || code=$?
            case $code in
                0) python="$path" && return 0 ;;
                3) seen+=", $path is $version" ;;
                4) seen+=", $path is $version without the venv module" ;;
                *) seen+=", $path does not run" ;;
            esac
        done < <(type -aP "$name")
    done
    return 1
}

make_environment() {
    if ! find_python; then
        say "no Python $minimum or newer with the venv module (${seen:+found:${seen#,}; }tried ${candidates[*]});" \
            "install one (Debian, Ubuntu: apt install python3 python3-venv) or set DDTREE_PYTHON to its path"
        exit 2
    fi
    say "making .venv with $python"
    rm -rf .venv
    "$python" -m venv .venv
}

# The extras asked for now and earlier: demo.sh after test.sh takes nothing away.
wanted_extras() {
    local earlier=""
    if [ -f "$stamp" ]; then earlier="$(sed -n 2p "$stamp")"; fi
    printf '%s\n' "$@" ${DDTREE_EXTRAS:-} $earlier | sed '/^$/d' | sort -u | paste -sd, -
}

version="$(probe .venv/bin/python)" || { make_environment && version="$(probe .venv/bin/python)"; }
extras="$(wanted_extras "$@")"
state="$(printf '%s\n%s' "python $version, pyproject.toml $(cksum <pyproject.toml)" "${extras//,/ }")"
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$state" ]; then
    say "installing ddtree-jax${extras:+ with $extras} into .venv (Python $version; the first time takes minutes)"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".${extras:+[$extras]}"
    printf '%s\n' "$state" >"$stamp"
    say "ready"
fi
