#!/usr/bin/env bash
# The main job on the embedded demo pair: plain, chain and tree decoding side by side. Options go to `ddtree-jax demo`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
exec .venv/bin/python -m ddtree_jax demo "$@"
