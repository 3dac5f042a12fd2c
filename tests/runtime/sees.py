"""What an actor sees of the machine; started in actors by test_ray_cluster."""

import os


class Sees:
    def gpus(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]
