"""Corrections of a dataset's labels: a file that people edit, and its application."""
