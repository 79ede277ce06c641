"""Has the kernels of a library built: by processes that build side by side, or in this one."""
