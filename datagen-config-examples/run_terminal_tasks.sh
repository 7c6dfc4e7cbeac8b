#!/bin/sh
# Starts the run of terminal_tasks.yaml, or goes on where an earlier one stood (stopped by its budget, by the endpoint, by
# hand). Further arguments are settings:
#   sh datagen-config-examples/run_terminal_tasks.sh --max_samples 20 --model openai/gpt-5-mini
set -eu
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" batch_runner.py --config datagen-config-examples/terminal_tasks.yaml --resume "$@"
