"""Galleries: the nearest of many embeddings, or of the class weights, by cosine similarity."""

from plsc.gallery.gallery import Gallery, build_gallery, open_gallery, write_gallery

__all__ = ["Gallery", "build_gallery", "open_gallery", "write_gallery"]
