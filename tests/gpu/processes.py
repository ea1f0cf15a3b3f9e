"""Programs in processes of their own: in which nothing has run yet, or which end in some way."""

import os
import subprocess
import sys
import textwrap


def run_python(program):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
