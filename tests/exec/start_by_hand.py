"""Start ``pipeproof ARGUMENTS`` as two ranks, with the variables that a launcher sets for each; argument 1 names it.

Its own exit status is the largest of the ranks'.
"""

import os
import subprocess
import sys


def environment(launcher, rank, port):
    """Variables of one of two ranks on one host."""
    if launcher == "open_mpi":
        return {
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_ID": str(port),  # of which the port is derived
        "SLURM_STEP_ID": "0",
    }


def main():
    """Start the ranks and wait for both."""
    launcher, port, *arguments = sys.argv[1:]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "pipeproof", *arguments], env={**os.environ, **environment(launcher, rank, port)}
        )
        for rank in range(2)
    ]
    sys.exit(max(rank.wait() for rank in ranks))


if __name__ == "__main__":
    main()
