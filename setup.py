"""What pyproject.toml cannot say: the kernels are loaded by ctypes, so one wheel serves every Python of a platform."""

from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext


class KernelsOfAnyPython(build_ext):
    """Builds ``_kernels.so``, whose name holds no version of Python."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return the library's path in the package."""
        return f"{Path(*fullname.split('.'))}.so"

    def copy_extensions_to_source(self) -> None:
        """Put the library beside the source, in place of one that an earlier release named after its Python."""
        for old in Path("diloco/codec").glob("_kernels.*.so"):
            old.unlink()
        super().copy_extensions_to_source()


class WheelOfAnyPython(bdist_wheel):
    """Tags the wheel with its platform alone."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the wheel's tags for Python, for its binary interface, and for the platform."""
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_ext": KernelsOfAnyPython, "bdist_wheel": WheelOfAnyPython})
