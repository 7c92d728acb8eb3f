"""torchrun, as a script that rank_server.py can run."""

from torch.distributed.run import main

if __name__ == "__main__":
    main()
