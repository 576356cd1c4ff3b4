"""What people read: one self-contained page a run, methods side by side, Markdown tables, a summary in a few lines."""

from components.report.methods import compare_methods
from components.report.page import write_page

__all__ = ["compare_methods", "write_page"]
