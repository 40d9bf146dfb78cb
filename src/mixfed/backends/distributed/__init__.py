"""One run over many processes and machines: the simulator on ranks that ``torchrun`` starts."""
