"""What people read: one self-contained page a run, methods or languages side by side, tables, a run in a few lines."""

from components.report.languages import compare_languages
from components.report.methods import compare_methods
from components.report.page import write_page

__all__ = ["compare_languages", "compare_methods", "write_page"]
