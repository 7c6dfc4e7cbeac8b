#!/bin/sh
# Starts the run of terminal_tasks.yaml, or goes on where an earlier one stood (stopped by its budget, by the endpoint, by
# hand). Further arguments are settings:
#   sh datagen-config-examples/run_terminal_tasks.sh --max_samples 20 --model openai/gpt-5-mini
# The rows run in containers, which need an engine and the package for it: .venv/bin/pip install -e '.[docker]'
set -eu
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python
fi
exec "$PYTHON" batch_runner.py --config datagen-config-examples/terminal_tasks.yaml --resume "$@"
