#include "host/error.h"

#include <cstdarg>
#include <cstdio>

namespace flash_kda::host {
namespace {
// A fixed buffer: remembering an error must not fail.
thread_local char last_error[1024];
}  // namespace

void fail(int32_t status, const char* format, ...) {
  char text[sizeof(last_error)];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  throw Error{status, text};
}

void remember(const std::string& text) noexcept {
  std::snprintf(last_error, sizeof(last_error), "%s", text.c_str());
}

const char* remembered() noexcept { return last_error; }

}  // namespace flash_kda::host
