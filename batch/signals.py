"""The signals that interrupt a run. A leaf."""

import signal

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""They reach the whole group: the parent answers them, and tells its workers what to do."""
