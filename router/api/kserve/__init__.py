"""KServe's Open Inference Protocol, version 2, with Triton's streaming call ModelStreamInfer."""
