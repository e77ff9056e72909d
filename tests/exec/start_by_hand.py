"""Start ``pipeproof ARGUMENTS`` as two ranks, with the variables that Slurm sets; argument 1 is the port.

Its own exit status is the largest of the ranks'.
"""

import os
import subprocess
import sys


def environment(rank, port):
    """Slurm's variables of one of two ranks on one host."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def main():
    """Start the ranks and wait for both."""
    port, *arguments = sys.argv[1:]
    ranks = [
        subprocess.Popen([sys.executable, "-m", "pipeproof", *arguments], env={**os.environ, **environment(rank, port)})
        for rank in range(2)
    ]
    sys.exit(max(rank.wait() for rank in ranks))


if __name__ == "__main__":
    main()
