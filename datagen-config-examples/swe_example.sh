#!/bin/bash
# Makes one instance in the SWE-bench form, out of a small repository, in the folder given: FOLDER/instances.jsonl.
set -euo pipefail
if [ -e "$1/instances.jsonl" ]; then
  echo "$1/instances.jsonl is there already; another folder, or this one removed, gives a new one"
  exit
fi
mkdir -p "$1" && cd "$1"
export GIT_CONFIG_GLOBAL=/dev/null GIT_AUTHOR_NAME=me GIT_AUTHOR_EMAIL=me@example.com
export GIT_COMMITTER_NAME=me GIT_COMMITTER_EMAIL=me@example.com

git init -q -b main greeting && cd greeting
cat >greeting.py <<'END'
def greet(name):
    return "Hello, " + name.upper()
END
cat >test_greeting.py <<'END'
import unittest

from greeting import greet


class GreetingTest(unittest.TestCase):
    def test_comma(self):
        self.assertTrue(greet("x").startswith("Hello, "))
END
echo __pycache__ >.gitignore
git add -A && git commit -q --allow-empty -m 'As it was'
cat >>test_greeting.py <<'END'

    def test_name(self):
        self.assertEqual(greet("Ada"), "Hello, Ada")
END
git diff >../test.patch && git checkout -q . && sed -i 's/name.upper()/name/' greeting.py
git diff >../gold.patch && git checkout -q .

cd .. && python3 - <<'END'
import json, pathlib, subprocess

instance = {
    "instance_id": "example__greeting-1",
    "repo": "example/greeting",
    "repo_url": str(pathlib.Path("greeting").resolve()),
    "base_commit": subprocess.check_output(["git", "-C", "greeting", "rev-parse", "HEAD"], text=True).strip(),
    "problem_statement": "greet() shouts: greet('Ada') gives 'Hello, ADA'.",
    "patch": pathlib.Path("gold.patch").read_text(),
    "test_patch": pathlib.Path("test.patch").read_text(),
    "FAIL_TO_PASS": ["test_name (test_greeting.GreetingTest.test_name)"],
    "PASS_TO_PASS": ["test_comma (test_greeting.GreetingTest.test_comma)"],
    "test_command": "python3 -m unittest -v test_greeting",
    "version": "1",
}
pathlib.Path("instances.part").write_text(json.dumps(instance) + "\n")
pathlib.Path("instances.part").rename("instances.jsonl")
END
