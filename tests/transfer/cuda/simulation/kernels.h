// The kernels as the simulated GPU sees them.

#pragma once

#include <cstdint>
#include <functional>
#include <string>

// Called for each access; returns whether it may happen. 0 bytes stand for a misaligned access.
using Touch = bool (*)(std::uint64_t address, std::uint64_t num_bytes, bool is_write);

// A kernel with its arguments, of which the table of chunks is one.
struct BoundKernel {
    std::function<void()> lane;  // runs one lane; empty if there is no such kernel
    std::uint64_t table = 0, table_bytes = 0;
};

BoundKernel bind_kernel(const std::string& name, void** arguments);

void run_kernel(const BoundKernel& launched, unsigned int num_ctas, unsigned int num_threads,
                Touch on_touch);
