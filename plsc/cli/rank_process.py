"""Start a rank that ends with its launcher: rank_process.py LAUNCHER_PID both|apart COMMAND [ARGUMENT ...]

On Linux the kernel sends SIGKILL to this process when the launcher ends, even if the launcher was killed. The
request survives exec. `both`: redirect stderr to stdout, the log file.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Replace this process by the command."""
    launcher, streams, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != int(launcher):  # it ended before the request
            os.kill(os.getpid(), signal.SIGKILL)
    if streams == "both":
        os.dup2(1, 2)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
