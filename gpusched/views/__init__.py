"""Data -> tables, text and JSON. Views fetch nothing.

In: values of services. Out: Rich renderables, JSON, pages. May import: model; others for types only. Begin with
`common`.
"""
