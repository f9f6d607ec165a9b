# A formula for a Homebrew tap. `.ci/release` writes it to dist/ with the version and the hash of the source distribution; the address is
# that of the place where the distribution was published. No Homebrew has run it yet.
class MlxBlockpool < Formula
  desc "Local server for several coding agents at once, on one machine with one model"
  url "ADDRESS/mlx_blockpool-VERSION.tar.gz"
  sha256 "HASH"
  license "Apache-2.0"

  depends_on arch: :arm64
  depends_on :macos
  depends_on "python@3.12"

  def install
    # mlx has no source distribution: wheels are installed, as pip does it.
    system "python3.12", "-m", "venv", libexec
    system libexec/"bin/pip", "install", buildpath
    bin.install_symlink libexec/"bin/mlx-blockpool"
  end

  service do
    run [opt_bin/"mlx-blockpool", "serve"]
    keep_alive true
    log_path var/"log/mlx-blockpool.log"
    error_log_path var/"log/mlx-blockpool.log"
  end

  test do
    system bin/"mlx-blockpool", "plan", "--model", "demo", "--memory", "16GB"
  end
end
