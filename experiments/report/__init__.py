"""Tables and pictures of result pages, rewritten from the files that lie beside them."""
