"""What CUDA needs beside MLX: the kernel header, NVRTC, CUDA graphs."""
