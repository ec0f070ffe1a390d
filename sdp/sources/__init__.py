"""The inputs of jobs: datasets of pictures, Parquet files, tars, folders of image files, and tables joined to them."""
