"""The few kernels that decide the speed, each beside its plain twin."""
