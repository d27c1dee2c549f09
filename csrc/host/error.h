// Errors inside the launcher: thrown as Error, turned into a status and a text at the C boundary.
#pragma once

#include <cstdint>
#include <string>

namespace flash_kda::host {

struct Error {
  int32_t status;
  std::string text;
};

[[noreturn]] void fail(int32_t status, const char* format, ...)
    __attribute__((format(printf, 2, 3)));

// Of the calling thread, for flash_kda_last_error().
void remember(const std::string& text) noexcept;
const char* remembered() noexcept;

// Runs `body`, which may throw; returns its status. No exception crosses the C boundary.
template <class Body>
int32_t guarded(Body body) noexcept {
  try {
    body();
    return 0;
  } catch (const Error& error) {
    remember(error.text);
    return error.status;
  } catch (...) {
    remember("out of host memory in the flash_kda launcher");
    return 1;
  }
}

}  // namespace flash_kda::host
