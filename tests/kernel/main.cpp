// One call of a kernel, read from a file: width, height, threads, turn, how many inputs and outputs, their sizes, and the inputs.
// The outputs go to another file.
int main(int count, char **names) {
  FILE *in = fopen(names[1], "rb"), *out = fopen(names[2], "wb");
  int64_t head[6], sizes[64];
  void *buffers[64];
  if (!in || !out || fread(head, 8, 6, in) != 6) simt::fail("no files");
  size_t arrays = size_t(head[4] + head[5]);
  if (fread(sizes, 8, arrays, in) != arrays) simt::fail("a short file");
  for (size_t i = 0; i < arrays; i++) {
    buffers[i] = malloc(size_t(sizes[i]));
    memset(buffers[i], 255, size_t(sizes[i]));
    if (i < size_t(head[4]) && fread(buffers[i], 1, size_t(sizes[i]), in) != size_t(sizes[i])) simt::fail("a short file");
  }
  run(buffers, int(head[0]), int(head[1]), int(head[2]), int(head[3]));
  for (size_t i = size_t(head[4]); i < arrays; i++) fwrite(buffers[i], 1, size_t(sizes[i]), out);
  fclose(out);
  return 0;
}
