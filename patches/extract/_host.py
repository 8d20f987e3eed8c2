"""What the host has, where there is no device to ask."""


def host_memory() -> tuple[int, int]:
    """Available and total memory of the host in bytes, as `torch.cuda.mem_get_info` orders them."""
    import psutil

    memory = psutil.virtual_memory()
    return memory.available, memory.total
